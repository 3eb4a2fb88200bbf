"""Sampling speed: mixed members in one batch, beside transformers' `generate` on one PEFT adapter in the same run.

    python benchmarks/rollout.py [--threads 2] [--rows 512] [--tokens 48] [--repeats 3] [--json FILE]

The embedded base, rank 8 on q, k, v, o; prompts of 30 to 60 random tokens with 8 samples each, and no end token, so
that every completion has `--tokens` tokens. Tokens per second count generated tokens only, prompts included in the
time. The peer gets the same prompts and adapter in batches of the same rows, and computes every prompt 8 times, as
`generate` does. Rounds of both are taken in turn; the best of each is shown, by wall time and by CPU time (on a busy
machine the wall clock measures the neighbours).
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from populora_trainer.population.lora import LoraPopulation
from populora_trainer.rollout.base_model import load_base
from populora_trainer.rollout.engine import RolloutRequest, all_completions
from populora_trainer.rollout.transformers_engine import TransformersEngine

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
SAMPLES, RANK = 8, 8


def population_of(dtype: str, members: int) -> LoraPopulation:
    population = LoraPopulation(load_base("builtin://nano", dtype).model, members, RANK, 2.0 * RANK, TARGETS, seed=0)
    for _, _, B in population.named_stacks():
        torch.nn.init.normal_(B, std=0.02, generator=torch.Generator().manual_seed(1))
    return population


def prompts_of(count: int, vocabulary: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(30, 61, (count,), generator=generator).tolist()
    return [tuple(torch.randint(4, vocabulary, (length,), generator=generator).tolist()) for length in lengths]


def ours(dtype: str, members: int, rows: int, tokens: int) -> Callable[[], None]:
    population = population_of(dtype, members)
    prompts = prompts_of(rows // SAMPLES, population.model.config.vocab_size)
    engine = TransformersEngine(
        population, end_ids=[population.model.config.vocab_size], pad_id=0, max_prompt_tokens=64
    )
    requests = [RolloutRequest(i % members, prompt, SAMPLES, i, tokens, 1.0) for i, prompt in enumerate(prompts)]
    return lambda: asyncio.run(all_completions(engine, requests)) and None


def peer(dtype: str, rows: int, tokens: int) -> Callable[[], None]:
    model = load_base("builtin://nano", dtype).model
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS))).eval()
    prompts = prompts_of(rows // SAMPLES, model.config.vocab_size)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    @torch.inference_mode()
    def run() -> None:
        peft.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            num_return_sequences=SAMPLES,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contestants: dict[str, Callable[[], None]] = {}
    for dtype in ("bfloat16", "float32"):
        contestants[f"8 members, {dtype}"] = ours(dtype, 8, options.rows, options.tokens)
        contestants[f"1 member, {dtype}"] = ours(dtype, 1, options.rows, options.tokens)
        contestants[f"peer: generate, 1 adapter, {dtype}"] = peer(dtype, options.rows, options.tokens)
    best = {name: (float("inf"), float("inf")) for name in contestants}
    for _ in range(options.repeats):
        for name, run in contestants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            best[name] = (min(best[name][0], wall), min(best[name][1], cpu))
    generated = options.rows // SAMPLES * SAMPLES * options.tokens
    load = os.getloadavg()[0]
    print(f"{options.rows} rows x {options.tokens} tokens, {options.threads} threads, load average {load:.1f}")
    print(f"{'':40} {'tokens/s':>10} {'per CPU second':>15}")
    for name, (wall, cpu) in best.items():
        print(f"{name:40} {generated / wall:10.0f} {generated / cpu:15.0f}")
    for dtype in ("bfloat16", "float32"):
        mixed, single = best[f"8 members, {dtype}"], best[f"peer: generate, 1 adapter, {dtype}"]
        print(f"8 members over the peer, {dtype}: {single[0] / mixed[0]:.2f} wall, {single[1] / mixed[1]:.2f} CPU")
    if options.json:
        figures = {
            name: {"tokens_per_second": generated / wall, "tokens_per_cpu_second": generated / cpu}
            for name, (wall, cpu) in best.items()
        }
        options.json.write_text(json.dumps({**vars(options), "json": None, "load": load, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
