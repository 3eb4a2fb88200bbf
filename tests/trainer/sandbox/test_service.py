import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from populora_trainer.errors import SandboxError
from populora_trainer.sandbox import Case, Judgement, SandboxPool, Verdict, remote
from populora_trainer.sandbox.remote import RemoteVerifier
from populora_trainer.sandbox.service import SandboxService, ServiceLimits
from populora_trainer.sandbox.wire import (
    WireError,
    case_from_json,
    case_to_json,
    judgement_from_json,
    judgement_to_json,
)

DOUBLE = "def f(x):\n    return 2 * x"
SLEEP = "def f(x):\n    while True:\n        pass"
texts = st.lists(st.text(max_size=8), min_size=1, max_size=3).map(tuple)


@st.composite
def cases(draw):
    inputs = draw(texts)
    outputs = draw(st.just(()) | st.just(inputs))
    answer = draw(st.none() | st.text(max_size=8))
    return Case(
        draw(st.text(max_size=4)), draw(st.sampled_from(["code_i", "code_o", "code_f"])), "p", inputs, answer, outputs
    )


@given(cases())
def test_a_case_survives_the_wire(case):
    assert case_from_json(case_to_json(case)) == case


@given(st.sampled_from(list(Verdict)), st.sampled_from(["valid", "wrong", "malformed"]), texts)
def test_a_judgement_survives_the_wire(verdict, kind, values):
    judgement = Judgement("1", verdict, kind, values, values, "said")
    assert judgement_from_json(judgement_to_json(judgement)) == judgement


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([], "a case is a JSON object"),
        ({"id": "1", "task": "code_x"}, "task is 'code_x', allowed are code_i, code_o, code_f"),
        ({"id": "1", "task": "code_o", "program": 3, "inputs": []}, "program must be a string, this is int"),
        ({"id": "1", "task": "code_o", "program": "", "inputs": "1"}, "inputs must be a list of strings"),
        ({"id": "1", "task": "code_o", "program": "", "inputs": ["1"], "outputs": ["1", "2"]}, "outputs are 2"),
        ({"id": "1", "task": "code_o", "program": "", "inputs": ["1"], "x": 1}, "unknown field 'x'"),
    ],
)
def test_what_is_no_case_is_a_sentence(record, said):
    with pytest.raises(WireError, match=re.escape(said)):
        case_from_json(record)


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(workers=2, timeout_seconds=0.3, memory_mib=128) as one:
        yield one


def serving(pool, asked, limits=None):
    """Run `asked(base URL, service)` beside a service."""

    async def run():
        service = SandboxService(pool, limits)
        async with TestServer(service.application()) as server:
            return await asked(str(server.make_url("")).rstrip("/"), service)

    return asyncio.run(run())


def problem(number, program=DOUBLE):
    return Case(str(number), "code_o", program, (str(number),))


def test_a_batch_is_judged_remotely_as_it_is_here(pool):
    batch = [problem(number) for number in range(70)]
    batch += [Case("a", "code_o", DOUBLE, ("4",), "8", ("8",)), Case("b", "code_o", DOUBLE, ("4",), "9", ("8",))]
    batch += [problem(7, SLEEP), Case("c", "code_f", DOUBLE, ("1", "2"), "def f(x):\n    return x + x", ("2", "4"))]

    async def asked(url, service):
        return await RemoteVerifier(url).judge(batch)

    assert serving(pool, asked) == asyncio.run(pool.judge(batch))


def test_malformed_requests_are_answered_with_what_is_wrong(pool):
    async def asked(url, service):
        answers = []
        async with aiohttp.ClientSession() as session:
            for body in (b"{", b"[]", b'{"cases": [{"id": "1"}]}', b'{"cases": [], "deadline_seconds": -1}'):
                async with session.post(f"{url}/judge", data=body) as answer:
                    answers.append((answer.status, (await answer.json())["error"]))
            async with session.post(f"{url}/judge", json={"cases": [{}] * 2000}) as answer:
                answers.append((answer.status, (await answer.json())["error"]))
        return answers

    answers = serving(pool, asked)
    assert {status for status, _ in answers} == {400}
    wanted = ("not JSON", '{"cases": [...]}', "cases[0]: task is None", "deadline_seconds is -1", "cases are 2000")
    for (_, error), said in zip(answers, wanted, strict=True):
        assert said in error


def test_a_full_queue_says_so_and_the_client_comes_again(pool):
    limits = ServiceLimits(queued_cases=2)

    async def asked(url, service):
        verifier = RemoteVerifier(url)
        slow = asyncio.create_task(verifier.judge([problem(0, SLEEP), problem(1, SLEEP)]))
        while not service._queued:
            await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as session:
            body = {"cases": [case_to_json(problem(2))]}
            async with session.post(f"{url}/judge", json=body) as answer:
                refused = answer.status, answer.headers["Retry-After"]
        quick = await verifier.judge([problem(2)])
        return refused, quick, await slow

    refused, (quick,), slow = serving(pool, asked, limits)
    assert refused == (429, "1")
    assert quick.outputs == ("4",)
    assert [one.verdict for one in slow] == [Verdict.TIMEOUT] * 2


def test_a_request_past_its_deadline_is_given_up(pool):
    async def asked(url, service):
        async with aiohttp.ClientSession() as session:
            body = {"cases": [case_to_json(problem(n, SLEEP + f"\n# {n}")) for n in range(20)], "deadline_seconds": 0.2}
            async with session.post(f"{url}/judge", json=body) as answer:
                return answer.status, service._queued

    assert serving(pool, asked) == (504, 0)


def test_health_means_that_programs_are_executed():
    async def asked(url, service):
        found = []
        async with aiohttp.ClientSession() as session:
            for path in ("healthz", "readyz"):
                async with session.get(f"{url}/{path}") as answer:
                    found.append(answer.status)
            service._draining = True
            async with session.get(f"{url}/readyz") as answer:
                found.append(answer.status)
            service.pool.close()
            service._executed_at = -1e9
            async with session.get(f"{url}/healthz") as answer:
                found.append(answer.status)
        return found

    with SandboxPool(workers=1, timeout_seconds=0.3) as own:
        assert serving(own, asked) == [200, 200, 503, 503]


def test_metrics_count_what_was_judged(pool):
    async def asked(url, service):
        await RemoteVerifier(url).judge([problem(1), problem(2, SLEEP)])
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
            return await answer.text()

    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(serving(pool, asked))
        for sample in family.samples
    }
    assert samples["populora_sandbox_verdicts_total", "valid", "valid"] == 1
    assert samples["populora_sandbox_verdicts_total", "invalid", "timeout"] == 1
    assert samples["populora_sandbox_requests_total", "200"] == 1
    assert samples["populora_sandbox_queued_cases",] == 0


class Replica:
    """`populora sandbox serve` as a process, on an address of its own so that replicas can share a port."""

    def __init__(self, address, port, *options):
        command = [Path(sys.executable).with_name("populora"), "sandbox", "serve", "--listen", f"{address}:{port}"]
        command += ["--timeout", "0.5", "--memory", "128", "--workers", "1", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.said = self.process.stdout.readline()

    def end(self, number):
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def replicas(monkeypatch):
    """Two replicas behind one name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    addresses = ["127.0.0.71", "127.0.0.72"]
    with contextlib.ExitStack() as stack:
        started = [Replica(address, port) for address in addresses]
        for one in started:
            stack.callback(one.process.wait)
            stack.callback(one.process.kill)
            assert one.said.startswith("Serving http://127.0.0.7"), one.said
        monkeypatch.setattr(remote, "_CASES_PER_REQUEST", 4)

        async def addresses_of(self):
            return addresses

        monkeypatch.setattr(RemoteVerifier, "_replicas", addresses_of)
        yield RemoteVerifier(f"http://sandbox:{port}", patience_seconds=20), started


def test_a_replica_that_dies_in_the_middle_of_a_batch_loses_and_doubles_nothing(replicas):
    verifier, (first, second) = replicas
    batch = [problem(number, f"{DOUBLE} + {number}") for number in range(200)]

    async def run():
        judging = asyncio.create_task(verifier.judge(batch))
        await asyncio.sleep(0.5)
        os.kill(first.process.pid, signal.SIGKILL)
        return await judging

    judgements = asyncio.run(run())
    assert [one.id for one in judgements] == [case.id for case in batch]
    assert [one.outputs for one in judgements] == [(str(3 * number),) for number in range(200)]
    second.end(signal.SIGKILL)


def test_a_service_that_is_told_to_end_finishes_what_it_has(replicas, monkeypatch):
    verifier, (first, second) = replicas
    second.end(signal.SIGKILL)

    async def addresses_of(self):
        return ["127.0.0.71"]

    monkeypatch.setattr(RemoteVerifier, "_replicas", addresses_of)
    batch = [problem(number, f"{SLEEP}\n# {number}") for number in range(3)]

    async def run():
        judging = asyncio.create_task(verifier.judge(batch))
        await asyncio.sleep(0.7)
        os.kill(first.process.pid, signal.SIGTERM)
        return await judging

    started = time.monotonic()
    assert [one.verdict for one in asyncio.run(run())] == [Verdict.TIMEOUT] * 3
    assert first.process.wait(30) == 0
    assert time.monotonic() - started > 1.0


def test_a_service_that_is_not_there_is_a_sentence():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(SandboxError, match=rf"the sandbox service localhost:{port} judged nothing for 0\.5 s"):
        asyncio.run(RemoteVerifier(f"http://localhost:{port}", patience_seconds=0.5).judge([problem(1)]))
    for url in ("localhost:80", "ftp://x", "http://x/path"):
        with pytest.raises(SandboxError, match=r"is not an address: http://HOST\[:PORT\] is allowed"):
            RemoteVerifier(url)
