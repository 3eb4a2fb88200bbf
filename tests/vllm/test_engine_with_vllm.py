"""Rollouts from real vLLM servers: tokens and log-probabilities of our own model, and whole runs of a population."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from adapters import RANK, TARGETS, ask, random_adapter, served
from s3_server import ACCESS, SECRET, client, gateway
from server import MANIFEST, VllmServer, controller_arguments, free_port, vllm_server
from sidecars import sidecar_process

from populora_api import Services, load_manifest
from populora_trainer.errors import RolloutError
from populora_trainer.learning.update import Group, Learner, LearnerSettings
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.population.members import Member, founders
from populora_trainer.population.peft_format import AdapterConfig
from populora_trainer.rollout.base_model import load_base
from populora_trainer.rollout.engine import Completion, RolloutRequest, all_completions
from populora_trainer.rollout.replicas import ServingAddress
from populora_trainer.rollout.transformers_engine import TransformersEngine
from populora_trainer.rollout.vllm_engine import VllmEngine
from populora_trainer.session import Events, open_session
from populora_trainer.storage.checkpoint import Adapter, newest_manifest, read_checkpoint
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import read_log
from populora_trainer.storage.publication import Publication, publish, read_publication

# A server takes minutes to start where other tests keep the machine busy.
pytestmark = pytest.mark.timeout(1800)

MEMBERS = founders(2, 2)
CONFIG = AdapterConfig(RANK, 16.0, TARGETS, "builtin://nano")
NANO = """
apiVersion: populora.dev/v1alpha1
kind: PopulationRun
metadata: {name: served}
spec:
  baseModel: {uri: "builtin://nano", dtype: float32}
  population: {teachers: 2, students: 2}
  adapter: {rank: 8, alpha: 16}
  tasks: {problemsPerMatchup: 24, referencesPerProposal: 1}
  training:
    {steps: 3, learningRate: 1e-3, rolloutsPerProblem: 8, proposalsPerPrompt: 8, maxPromptTokens: 256,
     maxResponseTokens: 96}
  evolution: {everySteps: 2}
  inference: {engine: VLLM}
  sandbox: {timeoutSeconds: 2, memoryMiB: 256}
  evaluation: {heldOut: {problems: 12, samples: 8}}
  storage: {uri: "file:///run"}
"""


@pytest.fixture(autouse=True)
def _leave_nothing_behind(vllm: VllmServer) -> Iterator[None]:
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    for name in served(vllm.url):
        ask(f"{vllm.url}/v1/unload_lora_adapter", {"lora_name": name})


def population_of(dtype: str, scale: float = 0.12) -> LoraPopulation:
    """Four members whose adapters change what the base says, each in its own way."""
    population = LoraPopulation(load_base("builtin://nano", dtype).model, 4, RANK, 16.0, TARGETS, seed=0)
    for slot in range(4):
        population.set_factors(slot, random_adapter(slot, scale).factors)
    return population


def engine_of(
    population: LoraPopulation, store: LocalStore, port: int, sidecar_port: int, **options: object
) -> VllmEngine:
    def publish_adapters(step: int, members: Sequence[Member]) -> Publication:
        adapters = {member.name: Adapter(population.factors(slot), CONFIG) for slot, member in enumerate(members)}
        return publish(store, step, adapters)

    address = ServingAddress("127.0.0.1", port, sidecar_port)
    return VllmEngine(address, publish_adapters, end_ids=[1], max_prompt_tokens=256, **options)


def prompts(count: int) -> list[tuple[int, ...]]:
    """Prompts of the embedded base's own tokens, special ones included, of different lengths."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(4, 60, (count,), generator=generator).tolist()
    return [tuple(torch.randint(2, 316, (length,), generator=generator).tolist()) for length in lengths]


def own_logprobs(population: LoraPopulation, request: RolloutRequest, completion: Completion) -> torch.Tensor:
    """What a plain forward of our own model gives the completion's tokens, at the request's temperature."""
    ids = torch.tensor([request.prompt_ids + completion.token_ids])
    with torch.no_grad(), population.route([request.member]):
        logits = population.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float()
    start = len(request.prompt_ids) - 1
    scaled = logits[start : start + len(completion.token_ids)] / (request.temperature or 1.0)
    return torch.log_softmax(scaled, -1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)


def sample(
    server: VllmServer, population: LoraPopulation, tmp_path: Path, requests: Sequence[RolloutRequest]
) -> list[list[Completion]]:
    store = LocalStore(tmp_path / "run")
    with sidecar_process(str(tmp_path / "run"), server.url, tmp_path / "adapters") as sidecar:
        engine = engine_of(population, store, server.port, int(sidecar.url.rpartition(":")[2]))

        async def follow_and_sample() -> list[list[Completion]]:
            await engine.follow(5, MEMBERS)
            return await all_completions(engine, requests)

        return asyncio.run(follow_and_sample())


def requests_at(temperature: float, n: int) -> list[RolloutRequest]:
    return [RolloutRequest(number % 4, prompt, n, 0, 40, temperature) for number, prompt in enumerate(prompts(24))]


def test_tokens_come_back_as_they_were_sampled_with_our_own_models_log_probabilities(vllm, tmp_path):
    population = population_of("float32")
    requests = [*requests_at(1.0, 4), *requests_at(0.6, 4), *requests_at(0.0, 1)]
    found = sample(vllm, population, tmp_path, requests)
    worst = 0.0
    for request, completions in zip(requests, found, strict=True):
        assert len(completions) == request.n
        for completion in completions:
            own = own_logprobs(population, request, completion)
            worst = max(worst, float((own - torch.tensor(completion.logprobs)).abs().max()))
            ended = completion.token_ids[-1] == 1
            assert completion.finish_reason == ("stop" if ended else "length")
            assert ended or len(completion.token_ids) == 40
            assert 1 not in completion.token_ids[:-1]
    assert worst < 1e-3
    assert {one.finish_reason for row in found for one in row} == {"stop", "length"}
    # Greedy is greedy, by our own model too, token by token.
    ours = TransformersEngine(population, end_ids=[1], pad_id=0, max_prompt_tokens=256)
    assert [row[0].token_ids for row in asyncio.run(all_completions(ours, requests[-24:]))] == [
        row[0].token_ids for row in found[-24:]
    ]


def test_every_member_says_something_else_to_the_same_prompt(vllm, tmp_path):
    population = population_of("float32", 0.3)
    prompt = prompts(1)[0]
    requests = [RolloutRequest(member, prompt, 1, 0, 24, 0.0) for member in range(4)]
    said = [row[0].token_ids for row in sample(vllm, population, tmp_path, requests)]
    assert len(set(said)) == 4


def mismatch(population: LoraPopulation, requests: Sequence[RolloutRequest], found: list[list[Completion]]):
    """What the learner measures of completions, without learning from them."""
    groups = [
        Group(
            request.member,
            "student",
            "code_o",
            request.prompt_ids,
            tuple(row),
            tuple(float(number % 2) for number in range(request.n)),
        )
        for request, row in zip(requests, found, strict=True)
    ]
    settings = LearnerSettings(learning_rate=0.0, temperature=requests[0].temperature)
    return Learner(population, settings, pad_id=0).update(groups)


def test_the_mismatch_metric_is_next_to_nothing_in_float32_and_tells_adapters_apart(vllm, tmp_path):
    population = population_of("float32")
    requests = requests_at(0.8, 4)
    found = sample(vllm, population, tmp_path, requests)
    right = mismatch(population, requests, found)
    assert set(right.mismatch_M) == {0, 1, 2, 3}
    assert max(right.mismatch_M.values()) < 1e-4
    for slot in range(4):  # as if vLLM had not applied the adapters
        population.set_factors(slot, random_adapter(slot, 0.0).factors)
    assert min(mismatch(population, requests, found).mismatch_M.values()) > 0.1


def test_the_mismatch_metric_in_bfloat16_is_that_of_its_rounding(tmp_path):
    manifest = MANIFEST.replace("dtype: float32", "dtype: bfloat16")
    population = population_of("bfloat16")
    requests = requests_at(1.0, 4)
    with vllm_server(tmp_path, arguments=controller_arguments(manifest)) as server:
        found = sample(server, population, tmp_path, requests)
    measured = mismatch(population, requests, found)
    assert measured.mismatch_mean is not None
    assert 1e-4 < measured.mismatch_mean < 0.05
    assert max(measured.mismatch_M.values()) < 0.1


def test_a_request_that_does_not_fit_the_server_is_vllms_own_sentence(vllm, tmp_path):
    request = RolloutRequest(0, prompts(1)[0], 1, 0, 5000, 1.0)
    with pytest.raises(RolloutError, match=r"refuses a request with HTTP 400: .*max_tokens=5000"):
        sample(vllm, population_of("float32"), tmp_path, [request])


# --- Whole runs ---


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "served.yaml"
    path.write_text(NANO)
    return path


def populora(environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("populora"), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


def test_a_run_in_a_bucket_with_vllm_solves_what_the_in_process_engine_solves(vllm, manifest, tmp_path):
    with gateway(tmp_path / "s3") as endpoint, ExitStack() as stack:
        client(endpoint).create_bucket(Bucket="runs")
        variables = {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_REGION": "us-east-1",
            "OMP_NUM_THREADS": "1",
        }
        environment = {**os.environ, **variables}
        sidecar = stack.enter_context(
            sidecar_process("s3://runs/served", vllm.url, tmp_path / "adapters", environment=variables)
        )
        words = ["--serving", vllm.url, "--sidecar-port", sidecar.url.rpartition(":")[2]]
        there = populora(environment, "run", manifest, *words, "--set", "storage.uri=s3://runs/served")
        assert there.returncode == 0, there.stderr + there.stdout
        last = sidecar.status()
        here = populora(environment, "run", manifest, "-o", tmp_path / "here", "--set", "inference.engine=Transformers")
        assert here.returncode == 0, here.stderr + here.stdout
        lines = {
            place: [json.loads(line) for line in text.splitlines()]
            for place, text in (
                (
                    "vllm",
                    client(endpoint).get_object(Bucket="runs", Key="served/metrics.jsonl")["Body"].read().decode(),
                ),
                ("here", (tmp_path / "here" / "metrics.jsonl").read_text()),
            )
        }
    assert [line["step"] for line in lines["vllm"]] == [0, 1, 2, 3]
    assert (last["step"], last["error"]) == (3, None)
    for line in lines["vllm"][1:]:
        assert line["learner"]["mismatch_worst_member"] < 1e-3
        assert {"sync", "propose", "solve"} <= set(line["seconds"])
    # Before the first step both engines sample from the same base: the same greedy answers, and the same solve rate
    # but for chance; in the first step, the same teachers and students.
    (before, first), (own_before, own_first) = lines["vllm"][:2], lines["here"][:2]
    held_out, own = before["held_out"], own_before["held_out"]
    assert abs(held_out["greedy"]["overall"] - own["greedy"]["overall"]) <= 1 / 36
    assert abs(held_out["solve_rate"]["overall"] - own["solve_rate"]["overall"]) < 0.12
    assert abs(first["valid_rate"] - own_first["valid_rate"]) < 0.25
    assert abs(first["solve_rate"]["overall"] - own_first["solve_rate"]["overall"]) < 0.3
    for role in ("teacher", "student"):
        assert abs(first["entropy"][role] - own_first["entropy"][role]) < 0.25


class OtherAddress(VllmServer):
    """A server on another loopback address, so that it can share the first one's port, as pods do."""

    ADDRESS = "127.0.0.2"

    @property
    def url(self) -> str:
        return f"http://{self.ADDRESS}:{self.port}"


@contextmanager
def sidecar_at(address: str, port: int, run: Path, vllm: VllmServer, folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "populora_trainer.cli", "sidecar", str(run), f"--listen={address}:{port}"]
    command += [f"--vllm={vllm.url}", f"--folder={folder}"]
    with open(folder.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(240)


def test_a_replica_that_is_killed_in_the_middle_of_a_run_costs_no_completion(vllm, manifest, tmp_path, monkeypatch):
    other = OtherAddress(tmp_path / "other", [*controller_arguments(), f"--host={OtherAddress.ADDRESS}"], vllm.port)
    other.folder.mkdir()
    real: Callable[..., list] = socket.getaddrinfo

    def both(host: str, port: int, *arguments: object, **options: object) -> list:
        if host != "vllm.test":
            return real(host, port, *arguments, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in ("127.0.0.1", OtherAddress.ADDRESS)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    run, port, told = tmp_path / "run", free_port(), []
    run.mkdir()
    in_second_step = threading.Event()

    def phase(name: str) -> None:
        if name == "propose" and opened and opened[0].trainer.step == 1:
            in_second_step.set()

    def kill() -> None:
        in_second_step.wait()
        os.kill(other.process.pid, signal.SIGKILL)

    opened = []
    try:
        other.start()
        other.wait()
        with (
            sidecar_at("127.0.0.1", port, run, vllm, tmp_path / "first"),
            sidecar_at(OtherAddress.ADDRESS, port, run, other, tmp_path / "second"),
        ):
            spec = load_manifest(manifest, ("evaluation.heldOut.problems=0",), output=run)
            events = Events(on_phase=phase, on_notice=told.append)
            services = Services(serving=f"http://vllm.test:{vllm.port}", sidecar_port=port)
            killer = threading.Thread(target=kill, daemon=True)
            killer.start()
            with open_session(spec, events=events, services=services) as session:
                opened.append(session)
                assert asyncio.run(session.train())
            killer.join(10)
    finally:
        other.stop(signal.SIGKILL)
    store = LocalStore(run, create=False)
    newest = newest_manifest(store)
    assert newest is not None
    assert newest.step == 3
    assert read_checkpoint(store, newest).adapters
    publication = read_publication(store)
    assert publication is not None
    assert publication.step == 2
    problems = list(read_log(store, "problems"))
    assert [sum(one["step"] == step for one in problems) for step in (1, 2, 3)] == [48, 48, 48]
    assert any(OtherAddress.ADDRESS in sentence for sentence in told), told
    for line in read_log(store, "metrics"):
        assert line["learner"]["mismatch_worst_member"] < 1e-3
