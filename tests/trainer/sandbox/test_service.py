import asyncio
import contextlib
import gzip
import json
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
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from populora_trainer.errors import SandboxError
from populora_trainer.sandbox import Case, Judgement, SandboxPool, Verdict, remote
from populora_trainer.sandbox import crew as crew_module
from populora_trainer.sandbox import service as service_module
from populora_trainer.sandbox.remote import RemoteVerifier
from populora_trainer.sandbox.service import SandboxService, ServiceLimits
from populora_trainer.sandbox.wire import (
    WireError,
    case_from_json,
    case_to_json,
    judgement_from_json,
    judgement_to_json,
    load_bounded,
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
        ({"id": "1", "task": "code_x"}, 'task is "code_x", allowed are code_i, code_o, code_f'),
        ({"id": "1", "task": "code_o", "program": 3, "inputs": []}, "program must be a string, this is 3"),
        ({"id": "1", "task": "code_o", "program": "", "inputs": "1"}, "inputs must be a list of strings"),
        ({"id": "1", "task": "code_o", "program": "", "inputs": ["1"], "outputs": ["1", "2"]}, "outputs are 2"),
        ({"id": "1", "task": "code_o", "program": "", "inputs": ["1"], "x": 1}, 'unknown field "x"'),
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
        runner = service.runner()
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return await asked("http://127.0.0.1:{1}".format(*runner.addresses[0]), service)
        finally:
            await runner.cleanup()

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


def test_the_seed_of_the_run_travels_with_the_cases(pool):
    """What passes by chance, a few of these, is another program under another seed."""
    noise = "def f(x):\n    h = hash(str(x))\n    return (h & 1023 ^ h >> 10 & 1023) < 250"
    batch = [problem(number, noise) for number in range(50)]

    async def asked(url, service):
        return [await RemoteVerifier(url, seed=seed).judge(batch) for seed in (5, (1 << 53) - 1)]

    one, other = ([judgement.verdict for judgement in judged] for judged in serving(pool, asked))
    assert one == [judgement.verdict for judgement in asyncio.run(pool.judge(batch, seed=5))]
    assert one != other


def test_malformed_requests_are_answered_with_what_is_wrong(pool):
    async def asked(url, service):
        answers = []
        async with aiohttp.ClientSession() as session:
            for body in (
                b"{",
                b"[]",
                b'{"cases": [{"id": "1"}]}',
                b'{"cases": [], "deadline_seconds": -1}',
                b'{"cases": [], "seed": -1}',
                b'{"cases": [], "sed": 3}',
                b'{"cases": [], "deadline_seconds": 1' + b"0" * 400 + b"}",
            ):
                async with session.post(f"{url}/judge", data=body) as answer:
                    answers.append((answer.status, (await answer.json())["error"]))
            async with session.post(f"{url}/judge", json={"cases": [{}] * 2000}) as answer:
                answers.append((answer.status, (await answer.json())["error"]))
        return answers

    answers = serving(pool, asked)
    assert {status for status, _ in answers} == {400}
    wanted = (
        "not JSON",
        '{"cases": [...]}',
        "cases[0]: task is null",
        "deadline_seconds is -1",
        "seed is -1",
        "'sed' is no field of a request, allowed are cases, deadline_seconds, seed",
        "deadline_seconds is 1000",
        "cases are 2000",
    )
    for (_, error), said in zip(answers, wanted, strict=True):
        assert said in error
        assert len(error) < 150


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


def test_health_means_that_programs_are_executed(monkeypatch):
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
            monkeypatch.setattr(service_module, "_CANARY_SECONDS", 0.0)
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


def body_of(*batch, **more):
    return json.dumps({"cases": [case_to_json(case) for case in batch], **more}).encode()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def slow_pool():
    """One worker, on which a program that hangs outlasts whatever a test does."""
    with SandboxPool(workers=1, timeout_seconds=120) as one:
        yield one


async def asking(url, body):
    """Send a request and return its connection without waiting for the answer."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /judge HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    return writer


def test_health_is_not_asked_of_programs_that_hang(slow_pool, monkeypatch):
    monkeypatch.setattr(service_module, "_CANARY_SECONDS", 0.0)
    monkeypatch.setattr(service_module, "_CANARY_WAIT", 0.1)
    monkeypatch.setattr(service_module, "_TROUBLE_SECONDS", 0.0)

    async def asked(url, service):
        connection = await asking(url, body_of(*[problem(n, f"{SLEEP}  # {n}") for n in range(10)]))
        await until(lambda: service._queued)
        found = []
        async with aiohttp.ClientSession() as session:
            for _ in range(5):
                async with session.get(f"{url}/healthz") as answer:
                    found.append(answer.status)
        connection.close()
        return found, service._queued

    assert serving(slow_pool, asked) == ([200] * 5, 10)


def test_a_pool_whose_workers_cannot_start_is_not_healthy(monkeypatch):
    monkeypatch.setattr(service_module, "_CANARY_SECONDS", 0.0)
    monkeypatch.setattr(service_module, "_CANARY_WAIT", 0.1)
    monkeypatch.setattr(service_module, "_TROUBLE_SECONDS", 0.2)

    def refuse(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    async def asked(url, service):
        async with aiohttp.ClientSession() as session:

            async def health():
                async with session.get(f"{url}/healthz") as answer:
                    return answer.status, await answer.text()

            with monkeypatch.context() as broken:
                broken.setattr(crew_module, "Lane", refuse)
                for place in service.pool._dispatcher._crew._places:
                    os.kill(place.lane.process.pid, signal.SIGKILL)
                async with asyncio.timeout(60):
                    while (sick := await health())[0] == 200:
                        pass
            async with asyncio.timeout(60):
                while (well := await health())[0] != 200:
                    pass
            return sick, well

    with SandboxPool(workers=1, timeout_seconds=0.3) as own:
        sick, well = serving(own, asked)
    assert sick[0] == 503
    assert "Cannot allocate memory" in sick[1]
    assert well == (200, "ok\n")


def test_a_client_that_has_gone_frees_its_queue(slow_pool):
    async def asked(url, service):
        connection = await asking(url, body_of(*[problem(n, f"{SLEEP}  # {n}") for n in range(50)]))
        await until(lambda: service._queued == 50)
        connection.close()
        await until(lambda: service._queued == 0)
        return service._held

    assert serving(slow_pool, asked) == 0


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"POST /judge HTTP/1.1\r\nHost: x\r\nContent-Le", b""),
        (b'POST /judge HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"cases"', b"HTTP/1.1 408 "),
    ],
)
def test_a_connection_that_says_nothing_for_long_is_closed(pool, sent, answered):
    async def asked(url, service):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(60):
            said = await reader.read()
        return said, service._held

    said, held = serving(pool, asked, ServiceLimits(transfer_seconds=0.3))
    assert said.startswith(answered)
    assert bool(said) == bool(answered)
    assert held == 0


def post(pool, body, limits=None, **headers):
    async def asked(url, service):
        async with aiohttp.ClientSession() as session:
            headers_ = {name.replace("_", "-"): value for name, value in headers.items()}
            async with session.post(f"{url}/judge", data=body, headers=headers_) as answer:
                return answer.status, (await answer.json()).get("error"), service._held

    return serving(pool, asked, limits)


def test_bodies_that_cannot_be_unpacked_are_the_clients_error(pool):
    good = body_of(problem(1))
    assert post(pool, gzip.compress(good), Content_Encoding="gzip") == (200, None, 0)
    for encoding, body in (
        ("gzip", good),
        ("gzip", gzip.compress(good)[:-20]),
        ("deflate", b"\xff" * 40),
        ("odd", good),
    ):
        status, error, held = post(pool, body, Content_Encoding=encoding)
        assert status == (415 if encoding == "odd" else 400), (encoding, error)
        assert held == 0
    bomb = gzip.compress(b" " * (4 << 20))
    status, error, _ = post(pool, bomb, ServiceLimits(body_bytes=1 << 20), Content_Encoding="gzip")
    assert (status, error) == (413, f"a request has at most {1 << 20} bytes")


def test_a_body_of_many_values_is_refused_before_they_are_made(pool, monkeypatch):
    flood = b'{"cases": [' + b"[]," * (1 << 20) + b"[]]}"
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(WireError, match="the body has more than 1000 values"):
        load_bounded(flood, 1000)
    with pytest.raises(WireError, match="the body has more than 1000 values"):
        load_bounded(b'["' + b'","' * (1 << 20) + b'"]', 1000)
    monkeypatch.undo()
    status, error, _ = post(pool, flood)
    assert status == 400
    assert "values" in error


values = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('[]{},"\\ a\u00e9')),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def counted(value):
    inner = [] if not isinstance(value, dict | list) else list(value.values() if isinstance(value, dict) else value)
    own = isinstance(value, dict | list) + max(0, len(inner) - 1)
    return own + sum(map(counted, inner))


@given(values, st.booleans())
def test_a_bounded_reading_counts_what_is_made_and_reads_what_json_reads(value, plain):
    body = json.dumps(value, ensure_ascii=not plain).encode()
    most = max(counted(value), body.count(b'"'))
    assert load_bounded(body, most) == value
    if counted(value):
        with pytest.raises(WireError, match="values"):
            load_bounded(body, counted(value) - 1)


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=abc",
        "application/openmetrics-text; version=\xe9\xff",
        "application/openmetrics-text; version=9.9.9; escaping=no",
        "text/plain; version=1.0.0.0.x; escaping=allow-utf-8",
        ";;;=,=;q=",
        "nothing/at-all",
    ],
)
def test_odd_accept_headers_are_no_fault_of_the_service(pool, accept):
    async def asked(url, service):
        headers = {"Accept": accept}
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics", headers=headers) as answer:
            return answer.status

    assert serving(pool, asked) in (200, 400)


def test_more_inputs_than_an_answer_may_hold_are_refused_and_the_client_asks_for_fewer_at_a_time(pool):
    many = Case("many", "code_f", DOUBLE, ("1",) * 5000)
    (judgement,) = asyncio.run(pool.judge([many]))
    assert (judgement.verdict, judgement.inputs) == (Verdict.INPUT_LIMIT, ())
    status, error, _ = post(pool, body_of(many))
    assert (status, error) == (413, "inputs of all cases are 5000, allowed are 4096 a request")

    batch = [Case(str(n), "code_f", f"{DOUBLE}  # {n}", ("1", "2", "3")) for n in range(20)]

    async def asked(url, service):
        return await RemoteVerifier(url).judge(batch)

    judgements = serving(pool, asked, ServiceLimits(inputs_per_request=8))
    assert [one.id for one in judgements] == [case.id for case in batch]
    assert {one.outputs for one in judgements} == {("2", "4", "6")}


def test_cases_that_take_longer_than_a_request_may_are_asked_for_in_smaller_requests(pool):
    async def asked(url, service):
        verifier = RemoteVerifier(url, patience_seconds=60, request_seconds=1.0)
        return await verifier.judge([problem(n, f"{SLEEP}  # {n}") for n in range(6)])

    assert [one.verdict for one in serving(pool, asked)] == [Verdict.TIMEOUT] * 6


@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 600_000)), max_size=100))
def test_requests_are_of_bounded_size_and_cover_all_cases_in_order(sizes):
    batch = [Case("", "code_f", "x" * chars, ("",) * inputs) for inputs, chars in sizes]
    chunks = list(remote._chunks(batch))
    assert [number for chunk in chunks for number in chunk] == list(range(len(batch)))
    for chunk in chunks:
        assert 1 <= len(chunk) <= remote._CASES_PER_REQUEST
        if len(chunk) > 1:
            assert sum(sizes[number][0] for number in chunk) <= remote._INPUTS_PER_REQUEST
            assert sum(sizes[number][1] for number in chunk) <= remote._CHARS_PER_REQUEST


def test_a_service_whose_time_is_over_answers_the_rest_and_ends(replicas):
    _, (first, second) = replicas
    second.end(signal.SIGKILL)
    port = first.said.rsplit(":", 1)[1].split()[0]

    async def run():
        async with aiohttp.ClientSession() as session:
            body = body_of(*[problem(n, f"{SLEEP}  # {n}") for n in range(1000)])
            asking = asyncio.create_task(session.post(f"http://127.0.0.71:{port}/judge", data=body))
            async with asyncio.timeout(60):
                while (
                    b"queued_cases 1000.0" not in await (await session.get(f"http://127.0.0.71:{port}/metrics")).read()
                ):
                    pass
            first.process.send_signal(signal.SIGTERM)
            first.process.send_signal(signal.SIGINT)  # a second one, as the time to finish is a minute
            answer = await asking
            return answer.status, (await answer.json())["error"]

    assert asyncio.run(run()) == (503, "the service is ending; ask another replica")
    assert first.process.wait(30) == 0


# Serves at an address until it is asked to judge POISON, which ends it as the out-of-memory killer would; it comes back
# as a pod's container does.
FRAGILE = """
import asyncio, os, sys
from populora_trainer.sandbox import SandboxPool
from populora_trainer.sandbox.service import SandboxService

class Fragile(SandboxPool):
    async def judge(self, cases, **options):
        if any("POISON" in case.program for case in cases):
            os.kill(os.getpid(), 9)
        return await super().judge(cases, **options)

async def serve():
    started = asyncio.get_running_loop().create_future()
    with Fragile(workers=1, timeout_seconds=2.0, memory_mib=128) as pool:
        started.add_done_callback(lambda bound: print("serving", flush=True))
        await SandboxService(pool).serve(sys.argv[1], int(sys.argv[2]), started)

while True:
    child = os.fork()
    if not child:
        asyncio.run(serve())
    os.waitpid(child, 0)
    print("died", flush=True)
"""


def test_a_batch_that_replicas_die_of_costs_one_verdict_and_not_the_replicas(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    addresses = ["127.0.0.73", "127.0.0.74"]

    async def addresses_of(self):
        return addresses

    monkeypatch.setattr(RemoteVerifier, "_replicas", addresses_of)
    batch = [problem(number, f"{DOUBLE} + {number}") for number in range(100)]
    batch[41] = problem(41, f"{DOUBLE}  # POISON")
    with contextlib.ExitStack() as stack:
        servers = []
        for address in addresses:
            command = [sys.executable, "-c", FRAGILE, address, str(port)]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
            stack.callback(server.wait)
            stack.callback(os.killpg, server.pid, signal.SIGKILL)
            servers.append(server)
        for server in servers:
            assert server.stdout.readline() == "serving\n"
        judgements = asyncio.run(RemoteVerifier(f"http://sandbox:{port}", patience_seconds=120).judge(batch))
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)
        deaths = sum(server.stdout.read().count("died") for server in servers)
    assert [one.id for one in judgements] == [case.id for case in batch]
    for number, one in enumerate(judgements):
        assert (one.verdict, one.outputs) == (("crashed", ()) if number == 41 else ("valid", (str(3 * number),)))
    assert 2 <= deaths <= 5


def test_a_service_that_is_told_to_end_while_it_starts_ends():
    command = [str(Path(sys.executable).with_name("populora")), "sandbox", "serve", "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--workers", "64"], stdout=subprocess.DEVNULL) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 60
        while not children.parent.exists() or len(list(children.parent.parent.iterdir())) < 2:  # the deciding thread
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, 143)
