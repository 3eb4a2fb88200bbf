"""A whole run whose rollouts come from vLLM over HTTP: a played one that writes what a script says."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import web
from scripted import ScriptedEngine

from populora_api import Services, load_manifest
from populora_trainer.errors import RolloutError
from populora_trainer.learning import mismatch
from populora_trainer.population.peft_format import adapter_from_files
from populora_trainer.randomness import draw
from populora_trainer.rollout import vllm_engine
from populora_trainer.rollout.engine import RolloutRequest
from populora_trainer.seeding import held
from populora_trainer.session import Events, Session, open_session
from populora_trainer.storage.checkpoint import newest_manifest, read_checkpoint, read_manifest
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import read_log
from populora_trainer.storage.publication import Publication, read_publication
from populora_trainer.tasks.buffer import ProblemBuffer

MANIFEST = Path(__file__).with_name("tiny.yaml")


@pytest.fixture(autouse=True)
def _restore_torch_settings() -> Iterator[None]:
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's log-probabilities are nobody's."""
    monkeypatch.setattr(mismatch, "ABSURD", float("inf"))


class ScriptedVllm:
    """vLLM and its sidecar on one address: loads what the run publishes when it is told to look.

    Attributes:
        published: every publication that it was told of.
        asked: the newest publication's seal and the adapter, for every request.
        failing: whether it answers no request.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = ScriptedEngine()
        self.published: list[Publication] = []
        self.asked: list[tuple[str, str]] = []
        self.ports: list[int] = []
        self.failing = False

    @asynccontextmanager
    async def serving(self):
        made = web.Application()
        made.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/refresh", self._refresh),
                web.get("/status", self._status),
            ]
        )
        runner = web.AppRunner(made, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        try:
            for _ in range(2):  # vLLM's port and the sidecar's
                made_socket = socket.socket()
                made_socket.bind(("127.0.0.1", 0))
                self.ports.append(made_socket.getsockname()[1])
                await web.SockSite(runner, made_socket).start()
            yield Services(serving=f"http://127.0.0.1:{self.ports[0]}", sidecar_port=self.ports[1])
        finally:
            await runner.cleanup()

    async def _refresh(self, request: web.Request) -> web.Response:
        publication = read_publication(LocalStore(self.folder, create=False))
        assert publication is not None
        if not self.published or publication != self.published[-1]:
            self.published.append(publication)
        return web.Response(status=202)

    async def _status(self, request: web.Request) -> web.Response:
        served = {one.name: one.digest for publication in self.published[-2:] for one in publication.adapters}
        newest = self.published[-1].sha256 if self.published else None
        return web.json_response({"publication": newest, "adapters": served, "seen": newest, "error": None})

    async def _completions(self, request: web.Request) -> web.Response:
        if self.failing:
            return web.Response(status=503)
        body = await request.json()
        newest = self.published[-1]
        self.asked.append((newest.sha256, body["model"]))
        seed = draw(0, body["model"], *body["prompt"])
        asked = RolloutRequest(0, tuple(body["prompt"]), body["n"], seed, body["max_tokens"], body["temperature"])
        choices = []
        for number in range(body["n"]):
            completion = self.engine._completion(asked, number)
            choices.append(
                {
                    "index": number,
                    "token_ids": completion.token_ids,
                    "logprobs": {"token_logprobs": completion.logprobs},
                    "finish_reason": completion.finish_reason,
                }
            )
        return web.json_response({"model": body["model"], "choices": choices})


def train(folder: Path, *overrides: str, stop_after: int | None = None) -> tuple[ScriptedVllm, Session, list[str]]:
    """Train the tiny manifest with a played vLLM; returns it, the session and what the user was told."""
    vllm, told, opened = ScriptedVllm(folder), [], []
    manifest = load_manifest(MANIFEST, ("inference.engine=VLLM", *overrides), output=folder)
    events = Events(stop=lambda: stop_after is not None and opened[0].trainer.step >= stop_after, on_notice=told.append)

    async def run() -> None:
        async with vllm.serving() as services:
            with open_session(manifest, events=events, services=services) as session:
                opened.append(session)
                await session.train()

    asyncio.run(run())
    return vllm, opened[0], told


def test_a_run_publishes_its_weights_each_step_and_samples_from_no_others(tmp_path: Path, lenient: None) -> None:
    folder = tmp_path / "run"
    vllm, session, _ = train(folder, "training.steps=3", "evolution.everySteps=2")
    assert [one.step for one in vllm.published] == [0, 1, 2]
    by_seal = {one.sha256: one for one in vllm.published}
    for seal, adapter in vllm.asked:
        assert adapter in by_seal[seal].names.values()
    assert {name for _, name in vllm.asked} == {
        name for publication in vllm.published for name in publication.names.values()
    }
    # Evolution opened the third step, so that its children sampled in it.
    assert sum("-g1" in member for member in vllm.published[2].names) == 2
    store = LocalStore(folder, create=False)
    manifest = newest_manifest(store)
    assert manifest is not None
    assert manifest.step == 3
    names = [member.name for member in manifest.members]
    assert list(vllm.published[2].names) == names
    for adapter in vllm.published[2].adapters:
        files = {file: store.get(adapter.key(file)) for file in adapter.files}
        assert adapter_from_files(files)
    lines = list(read_log(store, "metrics"))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["seconds"]["sync"] > 0 for line in lines)
    serving = session.monitor.status()["serving"]
    assert (serving["publishedStep"], serving["synced"], serving["replicas"]) == (2, 1, 1)
    assert not serving["waiting"]


def test_the_base_writes_the_first_problems_through_vllm(tmp_path: Path, lenient: None) -> None:
    folder = tmp_path / "run"
    vllm, _, _ = train(folder, "tasks.seedProblems=8", "training.steps=1")
    assert [one.step for one in vllm.published] == [0]
    # The first adapter is the base before the first step; a trained or another one is never asked for a seed problem.
    founder = vllm.published[0].names["t0"]
    store = LocalStore(folder, create=False)
    before, _ = read_log(store, "metrics")
    rounds = before["seeding"]["proposals"] // 4
    assert before["seeding"]["kept"] == 8
    assert [adapter for _, adapter in vllm.asked[:rounds]] == [founder] * rounds
    buffer = ProblemBuffer.from_bytes(read_checkpoint(store, read_manifest(store, 0)).buffer)
    assert held(buffer) == 8


def test_weights_that_have_not_changed_are_not_published_again(tmp_path: Path, lenient: None) -> None:
    folder = tmp_path / "run"
    settings = ("training.steps=2", "evolution.everySteps=0")
    held_out = ("evaluation.heldOut.problems=1", "evaluation.heldOut.samples=2", "evaluation.heldOut.everySteps=1")
    first, _, _ = train(folder, *settings, *held_out, stop_after=1)
    assert [one.step for one in first.published] == [0, 1]
    before = json.loads((folder / "serving.json").read_text())
    again, _, _ = train(folder, *settings, *held_out)
    assert [one.step for one in again.published] == [1, 2]
    assert again.published[0] == first.published[1]
    assert before["sha256"] == first.published[1].sha256


def test_a_run_whose_vllm_samples_other_weights_ends_and_keeps_nothing_of_the_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RolloutError, match=r"in step 1, the log-probabilities .* its adapter is not applied, or vLLM"):
        train(folder)
    newest = newest_manifest(LocalStore(folder, create=False))
    assert newest is not None
    assert newest.step == 0
    assert not list(read_log(LocalStore(folder, create=False), "metrics"))


def test_a_notable_difference_is_told_once(tmp_path: Path, lenient: None) -> None:
    _, _, told = train(tmp_path / "run")
    assert [sentence for sentence in told if "log-probabilities" in sentence] == told[:1]
    assert told[0].startswith("In step 1, ")


def test_a_run_that_is_suspended_after_its_vllm_has_gone_stops_at_its_last_checkpoint(
    tmp_path: Path, lenient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "_STOP_AFTER", 0.3)
    folder, told, opened, gone = tmp_path / "run", [], [], []
    vllm = ScriptedVllm(folder)
    manifest = load_manifest(MANIFEST, ("inference.engine=VLLM", "training.steps=5"), output=folder)

    async def run() -> bool:
        async with vllm.serving() as services:

            def phase(name: str) -> None:
                if name == "propose" and opened[0].trainer.step == 1:
                    gone.append(True)
                    vllm.failing = True

            # The signal comes when the step has begun, as a pod gets it together with vLLM's.
            events = Events(on_phase=phase, on_notice=told.append, stop=lambda: bool(gone))
            with open_session(manifest, events=events, services=services) as session:
                opened.append(session)
                return await session.train()

    assert asyncio.run(run()) is False
    assert opened[0].monitor.status()["phase"] == "Suspended"
    assert told[-1].startswith("Stopped while no vLLM replica was of use")
    assert told[-1].endswith("; the run goes on from step 1")
    newest = newest_manifest(LocalStore(folder, create=False))
    assert newest is not None
    assert newest.step == 1
