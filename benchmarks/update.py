"""Speed of the LoRA update: all members at once with shared prompts, beside one PEFT adapter in the same run.

    python benchmarks/update.py [--threads 2] [--groups 64] [--repeats 3] [--json FILE]

The embedded base, rank 8 on q, k, v, o; groups of 8 completions of 4 to 12 tokens for prompts of 30 to 60 tokens, as
code_o problems have them, every group with both rewards. Tokens per second count every completion with its prompt, as
an update without sharing would compute them, for all contestants; tokens that really went through the model are stated
beside. The peer is the plain update of one adapter: PEFT, a row per completion sorted by length, log-softmax, AdamW.
Rounds of all are taken in turn; the best of each is shown, by wall time and by CPU time.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from populora_trainer.learning.update import Group, Learner, LearnerSettings, UpdateMetrics
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.rollout.base_model import load_base
from populora_trainer.rollout.engine import Completion

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
SAMPLES, RANK, BATCH_TOKENS = 8, 8, 8192


def groups_of(count: int, members: int, vocabulary: int) -> list[Group]:
    chance, groups = random.Random(0), []
    for index in range(count):
        prompt = tuple(chance.randrange(4, vocabulary) for _ in range(chance.randrange(30, 61)))
        answers = [
            tuple(chance.randrange(4, vocabulary) for _ in range(chance.randrange(4, 13))) for _ in range(SAMPLES)
        ]
        completions = tuple(Completion(answer, (-4.0,) * len(answer), "stop") for answer in answers)
        rewards = (1.0, 0.0, *(float(chance.random() < 0.5) for _ in answers[2:]))
        groups.append(Group(index % members, "student", "code_o", prompt, completions, rewards))
    return groups


def ours(dtype: str, members: int, count: int, shared: bool) -> Callable[[], UpdateMetrics]:
    model = load_base("builtin://nano", dtype).model
    population = LoraPopulation(model, members, RANK, 2.0 * RANK, TARGETS, seed=0)
    learner = Learner(population, LearnerSettings(1e-4, batch_tokens=BATCH_TOKENS), pad_id=0)
    learner.shares_prompts = learner.shares_prompts and shared
    groups = groups_of(count, members, model.config.vocab_size)
    return lambda: learner.update(groups)


def peer(dtype: str, count: int) -> Callable[[], None]:
    model = load_base("builtin://nano", dtype).model
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS)))
    learnable = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnable, lr=1e-4, weight_decay=0.0)
    rows = [
        (group.prompt_ids, completion.token_ids, 2 * reward - 1)
        for group in groups_of(count, 1, model.config.vocab_size)
        for completion, reward in zip(group.completions, group.rewards_G, strict=True)
    ]
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    total = sum(len(answer) for _, answer, _ in rows)
    batches: list[list[tuple[tuple[int, ...], tuple[int, ...], float]]] = [[]]
    for row in reversed(rows):
        longest = max((len(p) + len(a) for p, a, _ in batches[-1]), default=0)
        if longest * (len(batches[-1]) + 1) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(row)

    def run() -> None:
        for batch in batches:
            width = max(len(p) + len(a) for p, a, _ in batch)
            ids = torch.tensor([[*p, *a] + [0] * (width - len(p) - len(a)) for p, a, _ in batch])
            mask = torch.tensor([[1] * (len(p) + len(a)) + [0] * (width - len(p) - len(a)) for p, a, _ in batch])
            weight = torch.tensor(
                [[0.0] * len(p) + [r] * len(a) + [0.0] * (width - len(p) - len(a)) for p, a, r in batch]
            )
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
                logits = peft(input_ids=ids, attention_mask=mask).logits
            logprobs = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
            (-(logprobs * weight[:, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(learnable, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contestants: dict[str, Callable[[], object]] = {}
    for dtype in ("bfloat16", "float32"):
        contestants[f"8 members, shared prompts, {dtype}"] = ours(dtype, 8, options.groups, shared=True)
        contestants[f"8 members, a row each, {dtype}"] = ours(dtype, 8, options.groups, shared=False)
        contestants[f"1 member, shared prompts, {dtype}"] = ours(dtype, 1, options.groups, shared=True)
        contestants[f"peer: PEFT, 1 adapter, {dtype}"] = peer(dtype, options.groups)
    best = {name: (float("inf"), float("inf")) for name in contestants}
    computed: dict[str, int] = {}
    unshared = 0
    for _ in range(options.repeats):
        for name, run in contestants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            metrics = run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            best[name] = (min(best[name][0], wall), min(best[name][1], cpu))
            if isinstance(metrics, UpdateMetrics):
                computed[name], unshared = metrics.computed_tokens, metrics.unshared_tokens
    load = os.getloadavg()[0]
    print(
        f"{options.groups} groups x {SAMPLES}, {unshared} tokens unshared, {options.threads} threads, load {load:.1f}"
    )
    print(f"{'':40} {'tokens/s':>10} {'per CPU second':>15} {'computed/s':>12}")
    for name, (wall, cpu) in best.items():
        through = computed.get(name, unshared) / wall
        print(f"{name:40} {unshared / wall:10.0f} {unshared / cpu:15.0f} {through:12.0f}")
    for dtype in ("bfloat16", "float32"):
        mixed, single = best[f"8 members, shared prompts, {dtype}"], best[f"peer: PEFT, 1 adapter, {dtype}"]
        print(f"8 members over the peer, {dtype}: {single[0] / mixed[0]:.2f} wall, {single[1] / mixed[1]:.2f} CPU")
    if options.json:
        figures = {
            name: {"tokens_per_second": unshared / wall, "tokens_per_cpu_second": unshared / cpu}
            for name, (wall, cpu) in best.items()
        }
        options.json.write_text(json.dumps({**vars(options), "json": None, "load": load, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
