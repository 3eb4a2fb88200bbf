"""The vLLM engine against played replicas: what is asked of whom, and that nothing is lost, doubled or stale."""

import asyncio
import gc
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from replica_server import (
    END,
    Json,
    PlayedReplica,
    Replicas,
    changed,
    cut,
    drop,
    expected,
    hang,
    publication_of,
    redirect,
    replicas,
    status,
    text,
)

from populora_trainer.errors import RolloutError, RolloutStoppedError
from populora_trainer.population.members import Member
from populora_trainer.rollout import replicas as replicas_module
from populora_trainer.rollout import vllm_engine
from populora_trainer.rollout.engine import Completion, RolloutRequest, Wave, all_completions
from populora_trainer.rollout.replicas import ServingAddress, Sync
from populora_trainer.rollout.vllm_engine import VllmEngine

MEMBERS = (Member("t0", "teacher"), Member("s0", "student"))
T0, S0 = (one.name for one in publication_of(0).adapters)


class Following:
    """An engine with what it told and what it published."""

    def __init__(self, served: Replicas, **options: object) -> None:
        self.served = served
        self.said: list[str] = []
        self.syncs: list[Sync] = []
        self.engine = VllmEngine(
            served.address,
            lambda step, members: served.publish(publication_of(step, tuple(one.name for one in members))),
            end_ids=[END],
            max_prompt_tokens=40,
            vocabulary=64,
            notice=self.said.append,
            on_sync=self.syncs.append,
            **{"patience_seconds": 20.0, "request_seconds": 10.0, **options},
        )

    async def follow(self, step: int = 0) -> None:
        await self.engine.follow(step, MEMBERS)

    async def all(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        return await all_completions(self.engine, requests)


def request(number: int, *, member: int = 0, n: int = 2, temperature: float = 1.0) -> RolloutRequest:
    return RolloutRequest(member, (2 + number % 7, 3 + number), n, number, 8, temperature)


def play(
    test: Callable[[Following], Awaitable[object]],
    count: int = 1,
    options: dict[str, object] | None = None,
    **replica: object,
):
    """Run `test(engine)` beside played replicas."""

    async def run() -> object:
        async with replicas(count, **replica) as served:
            return await asyncio.wait_for(test(Following(served, **(options or {}))), 60)

    return asyncio.run(run())


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the user of a wait after a moment, and look at replicas again as soon."""
    monkeypatch.setattr(vllm_engine, "_FIRST_NOTICE", 0.05)
    for module in (vllm_engine, replicas_module):
        monkeypatch.setattr(module, "LOOK_AGAIN", 0.05)
    monkeypatch.setattr(replicas_module, "_FIRST_REST", 0.05)


# --- What is asked and what comes back ---


def test_a_request_names_its_members_adapter_and_leaves_nothing_to_a_models_defaults():
    async def test(one: Following) -> None:
        await one.follow()
        await one.all([request(0), request(1, member=1, temperature=0.6)])
        bodies = {body["model"]: body for body in one.served.replicas[0].asked}
        assert bodies.keys() == {T0, S0}
        assert bodies[T0] == {
            "model": T0,
            "prompt": [2, 3],
            "n": 2,
            "max_tokens": 8,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
            "stop_token_ids": [END],
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": False,
        }
        assert bodies[S0]["temperature"] == 0.6
        assert "seed" not in bodies[T0]

    play(test)


def test_completions_come_back_with_their_tokens_log_probabilities_and_how_they_ended():
    requests = [request(number, member=number % 2, n=1 + number % 4) for number in range(20)]

    async def test(one: Following) -> list[list[Completion]]:
        await one.follow()
        return await one.all(requests)

    found = play(test)
    assert found == [expected(one) for one in requests]
    assert {completion.finish_reason for row in found for completion in row} == {"stop", "length"}


def test_greedy_completions_are_computed_once_and_given_as_often_as_wanted():
    asked = request(4, n=3, temperature=0.0)

    async def test(one: Following) -> list[list[Completion]]:
        await one.follow()
        found = await one.all([asked])
        assert [body["n"] for body in one.served.replicas[0].asked] == [1]
        return found

    assert play(test) == [expected(asked)]


def test_what_is_done_first_comes_first_and_every_request_once():
    async def late(web_request: object, body: Json) -> object:
        await asyncio.sleep(0.3)
        return await text_of(body)

    async def text_of(body: Json) -> object:
        from aiohttp import web
        from replica_server import answer_to

        return web.json_response(answer_to(body))

    async def test(one: Following) -> list[Wave]:
        await one.follow()
        one.served.replicas[0].faults = [late]
        return [wave async for wave in one.engine.generate([request(number) for number in range(6)])]

    waves = play(test)
    numbers = [[number for number, _ in wave] for wave in waves]
    assert len(waves) > 1
    assert len(numbers[-1]) == 1
    assert all(wave == sorted(wave) for wave in numbers)
    assert sorted(number for wave in numbers for number in wave) == list(range(6))


def test_prompts_over_the_limits_are_refused_before_anything_is_asked():
    async def test(one: Following) -> None:
        await one.follow()
        long = RolloutRequest(0, (5,) * 41, 1, 0, 8, 1.0)
        with pytest.raises(RolloutError, match="the prompt of request 1 has 41 tokens; at most 40 are allowed"):
            await one.all([request(0), long])
        with pytest.raises(RolloutError, match=r"request 0 needs 2 \+ 8 positions; the base model has 9"):
            await Following(one.served, positions=9).all([request(0)])
        with pytest.raises(RolloutError, match=r"the temperature is 0\.001: vLLM samples at 0, and from 0\.01 on"):
            await one.all([request(0, temperature=0.001)])
        assert not one.served.replicas[0].asked

    play(test)


# --- Faults ---


def _one_choice_short(answer: Json) -> None:
    answer["choices"].pop()


def _set(path: str, value: object) -> Callable[[Json], None]:
    def change(answer: Json) -> None:
        *parents, last = path.split(".")
        target = answer["choices"][0]
        for name in parents:
            target = target[name]
        target[last] = value

    return change


WRONG = {
    "no JSON": text("{"),
    "no object": text("[]"),
    "no choices": text("{}"),
    "a choice too few": changed(_one_choice_short),
    "a choice twice": changed(_set("index", 0)),
    "a choice without a number": changed(_set("index", [])),
    "a token that no model knows": changed(_set("token_ids", [10**30])),
    "JSON without end": text("[" * 100_000),
    "another model": changed(lambda answer: answer.update(model="base")),
    "no token ids": changed(_set("token_ids", None)),
    "text as token ids": changed(_set("token_ids", ["a"])),
    "no log-probabilities": changed(_set("logprobs", None)),
    "NaN": changed(_set("logprobs.token_logprobs", [float("nan")] * 8)),
    "a log-probability too few": changed(_set("logprobs.token_logprobs", [])),
    "probabilities above 1": changed(
        lambda answer: [
            one["logprobs"].update(token_logprobs=[0.5] * len(one["token_ids"])) for one in answer["choices"]
        ]
    ),
    "NaN everywhere": changed(
        lambda answer: [
            one["logprobs"].update(token_logprobs=[float("nan")] * len(one["token_ids"])) for one in answer["choices"]
        ]
    ),
    "another prompt": changed(_set("prompt_token_ids", [9, 9, 9])),
    "an end that its tokens do not say": changed(_set("finish_reason", "abort")),
}
PASSING = {
    "500": status(500, "EngineCore has died"),
    "503": status(503),
    "429": status(429),
    "404": status(404, "The model does not exist."),
    "a redirection": redirect,
    "a hang": hang,
    "half an answer": cut,
    "a dropped connection": drop,
}


@pytest.mark.parametrize("fault", [*PASSING.values(), *WRONG.values()], ids=[*PASSING, *WRONG])
def test_what_one_replica_fails_to_do_another_does(fault, soon):
    requests = [request(number) for number in range(12)]

    async def test(one: Following) -> list[list[Completion]]:
        await one.follow()
        one.served.replicas[0].always = fault
        found = await one.all(requests)
        assert one.served.replicas[0].asked
        assert any("127.0.0.61" in sentence and "go to the others" in sentence for sentence in one.said)
        return found

    assert play(test, 2, {"request_seconds": 0.5}) == [expected(one) for one in requests]


@pytest.mark.parametrize("fault", [*PASSING.values(), WRONG["no JSON"]], ids=[*PASSING, "no JSON"])
def test_a_fault_of_the_only_replica_that_passes_costs_nothing_but_time(fault, soon):
    requests = [request(number) for number in range(3)]

    async def test(one: Following) -> list[list[Completion]]:
        await one.follow()
        one.served.replicas[0].faults = [fault] * 3
        return await one.all(requests)

    assert play(test, 1, {"request_seconds": 0.3}) == [expected(one) for one in requests]


def test_a_server_that_answers_one_request_wrongly_again_and_again_ends_the_run(soon):
    async def test(one: Following) -> None:
        await one.follow()
        for replica in one.served.replicas:
            replica.always = WRONG["NaN everywhere"]
        with pytest.raises(
            RolloutError, match=r"answers one request 3 times with something else: 127\.0\.0\.6[12]: .*no"
        ):
            await one.all([request(0)])

    play(test, 2)


@pytest.mark.parametrize("code", [400, 401, 422])
def test_a_request_that_vllm_refuses_is_not_repeated(code):
    async def test(one: Following) -> None:
        await one.follow()
        one.served.replicas[0].always = status(code, "maximum context\nlength is 8 tokens")
        said = rf"127\.0\.0\.61 refuses a request with HTTP {code}: maximum context length is 8 tokens"
        with pytest.raises(RolloutError, match=said):
            await one.all([request(0)])
        assert len(one.served.replicas[0].asked) == 1

    play(test)


def test_of_many_requests_that_fail_one_error_is_told(caplog):
    async def test(one: Following) -> None:
        await one.follow()
        one.served.replicas[0].always = status(400, "no")
        with pytest.raises(RolloutError, match="refuses a request with HTTP 400"):
            await one.all([request(number) for number in range(30)])

    play(test)
    gc.collect()
    assert not caplog.records, "the event loop misses errors that nobody has taken"


def test_servers_that_fail_for_longer_than_the_patience_are_an_error_that_says_why(soon):
    async def test(one: Following) -> None:
        await one.follow()
        one.served.replicas[0].always = status(500, "out of memory")
        with pytest.raises(
            RolloutError, match=r"completed nothing for 0\.4 s \(127\.0\.0\.61: HTTP 500 out of memory\)"
        ):
            await one.all([request(0)])

    play(test, 1, {"patience_seconds": 0.4})


def test_a_replica_that_dies_in_the_middle_loses_and_doubles_nothing(soon):
    requests = [request(number, n=1) for number in range(60)]

    async def test(one: Following) -> list[list[Completion]]:
        await one.follow()
        dying, living = one.served.replicas
        dying.seconds = living.seconds = 0.05

        async def die() -> None:
            while len(dying.asked) < 10:
                await asyncio.sleep(0.01)
            await one.served.kill(dying)

        killing = asyncio.create_task(die())
        found = await one.all(requests)
        await killing
        return found

    assert play(test, 2, {"completions_per_replica": 8}) == [expected(one) for one in requests]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_goes_wrong_and_when_every_request_is_answered_once(seed, soon):
    chance = random.Random(seed)
    requests = [request(number, member=number % 2, n=1 + number % 3) for number in range(60)]
    faults = [*PASSING.values(), WRONG["no JSON"], WRONG["NaN"]]
    faults.remove(hang)

    async def test(one: Following) -> list[Wave]:
        await one.follow()
        for replica in one.served.replicas:
            for _ in range(80):
                replica.faults.append(chance.choice(faults) if chance.random() < 0.15 else _right(chance.random() / 50))
        return [wave async for wave in one.engine.generate(requests)]

    waves = play(test, 3, {"completions_per_replica": 12})
    found = [number for wave in waves for number, _ in wave]
    assert sorted(found) == list(range(60))
    assert [completions for _, completions in sorted(pair for wave in waves for pair in wave)] == [
        expected(one) for one in requests
    ]


def _right(seconds: float):
    async def answer(web_request: object, body: Json) -> object:
        from aiohttp import web
        from replica_server import answer_to

        await asyncio.sleep(seconds)
        return web.json_response(answer_to(body))

    return answer


def test_who_stops_listening_stops_the_work(soon):
    async def test(one: Following) -> None:
        await one.follow()
        one.served.replicas[0].faults = [_right(0)]
        one.served.replicas[0].always = hang
        waves = one.engine.generate([request(number) for number in range(5)])
        await anext(waves)
        before = asyncio.all_tasks()
        await waves.aclose()
        assert len(asyncio.all_tasks()) < len(before)
        for _ in range(100):
            if not one.served.replicas[0].in_flight:
                break
            await asyncio.sleep(0.02)
        assert one.served.replicas[0].in_flight == 0

    play(test)


@pytest.mark.parametrize("when", ["waiting for an echo", "sampling"])
def test_a_run_that_is_asked_to_stop_does_so_where_no_server_is_left(when, soon, monkeypatch):
    monkeypatch.setattr(vllm_engine, "_STOP_AFTER", 0.2)

    async def test(one: Following) -> None:
        await one.follow()
        await one.served.kill(one.served.replicas[0])
        with pytest.raises(RolloutStoppedError, match="Stopped while no vLLM"):
            await (one.follow(1) if when == "waiting for an echo" else one.all([request(0)]))

    play(test, 1, {"stop": lambda: True})


def test_a_run_that_is_asked_to_stop_finishes_what_servers_are_at_work_on(soon, monkeypatch):
    monkeypatch.setattr(vllm_engine, "_STOP_AFTER", 0.1)

    async def test(one: Following) -> None:
        await one.follow()
        one.served.replicas[0].seconds = 0.6
        requests = [request(number) for number in range(4)]
        assert await one.all(requests) == [expected(asked) for asked in requests]

    play(test, 1, {"stop": lambda: True, "completions_per_replica": 2})


# --- Load ---


def test_a_replica_has_no_more_to_do_than_it_may_and_the_idle_one_is_asked(soon):
    requests = [request(number, n=4) for number in range(40)]

    async def test(one: Following) -> list[PlayedReplica]:
        await one.follow()
        for replica, seconds in zip(one.served.replicas, (0.01, 0.01, 0.12), strict=True):
            replica.seconds = seconds
        await one.all(requests)
        return one.served.replicas

    quick, other, slow = play(test, 3, {"completions_per_replica": 8})
    assert max(one.most_in_flight for one in (quick, other, slow)) == 8
    assert len(slow.asked) < len(quick.asked)
    assert sum(len(one.asked) for one in (quick, other, slow)) == 40


def test_a_request_of_more_than_a_replica_may_have_goes_alone(soon):
    async def test(one: Following) -> list[list[Completion]]:
        await one.follow()
        one.served.replicas[0].seconds = 0.02
        found = await one.all([request(0, n=5), request(1, n=1), request(2, n=5)])
        assert one.served.replicas[0].most_in_flight == 5
        return found

    assert [len(row) for row in play(test, 1, {"completions_per_replica": 4})] == [5, 1, 5]


# --- Following the weights ---


def test_rollouts_wait_until_every_replica_echoes_the_publication(soon):
    async def test(one: Following) -> None:
        slow = one.served.replicas[1]
        slow.loads = False
        following = asyncio.create_task(one.follow(3))
        await asyncio.sleep(0.3)
        assert not following.done()
        name = publication_of(3).adapters[0].name
        assert one.said
        assert one.said[0].startswith("Waiting for vLLM at vllm.test:")
        assert f"127.0.0.62: {name}, {publication_of(3).adapters[1].name} not loaded" in one.said[0]
        assert (one.syncs[-1].waiting, one.syncs[-1].synced, one.syncs[-1].replicas) == (True, 1, 2)
        slow.load()
        await following
        assert (one.syncs[-1].waiting, one.syncs[-1].synced, one.syncs[-1].step) == (False, 2, 3)
        assert one.syncs[-1].seconds > 0.25
        assert "serves the adapters of step 3 after" in one.said[-1]
        assert [replica.refreshed for replica in one.served.replicas] == [1, 1]

    play(test, 2)


def test_an_echo_that_never_comes_is_told_and_ends_the_run(soon):
    async def test(one: Following) -> None:
        one.served.replicas[0].error = "adapters/ab is damaged"
        said = (
            r"vLLM at vllm\.test:\d+ did not serve the adapters of step 2 for 0\.4 s: 127\.0\.0\.61: t0-s000002-\w+, "
            r"s0-s000002-\w+ not loaded: adapters/ab is damaged; the log of the sidecar"
        )
        with pytest.raises(RolloutError, match=said):
            await one.follow(2)
        assert any("adapters/ab is damaged" in sentence for sentence in one.said)
        assert one.syncs[-1].problem.endswith("adapters/ab is damaged")

    play(test, 1, {"patience_seconds": 0.4}, loads=False)


def test_an_echo_of_another_publication_or_of_other_weights_is_none(soon):
    async def test(one: Following) -> None:
        await one.follow(1)
        replica = one.served.replicas[0]
        replica.loads = False
        with pytest.raises(RolloutError, match="not loaded"):
            await one.follow(2)

        async def other_weights(web_request: object) -> object:
            from aiohttp import web

            newest = publication_of(2)
            adapters = {adapter.name: "0" * 64 for adapter in newest.adapters}
            return web.json_response({"publication": newest.sha256, "adapters": adapters, "error": None})

        replica.status = other_weights  # type: ignore[method-assign]
        await one.served.kill(replica, one.served.sidecar_port)
        await one.served.serve_sidecar(replica)
        with pytest.raises(RolloutError, match="not loaded"):
            await one.follow(2)

    play(test, 1, {"patience_seconds": 0.3})


def test_a_stale_replica_is_never_asked_and_is_asked_again_when_it_has_caught_up(soon):
    async def test(one: Following) -> None:
        await one.follow(1)
        quick, slow = one.served.replicas
        slow.loads = False
        await one.follow(2)
        assert "Going on with 1 of 2 vLLM replicas" in one.said[-1]
        requests = [request(number) for number in range(30)]
        assert await one.all(requests) == [expected(asked) for asked in requests]
        assert (len(quick.asked), slow.asked) == (30, [])
        slow.load()
        quick.seconds = slow.seconds = 0.05
        assert await one.all(requests) == [expected(asked) for asked in requests]
        assert slow.asked
        assert {body["model"] for body in slow.asked} == {publication_of(2).adapters[0].name}
        assert (one.syncs[-1].synced, one.syncs[-1].replicas, one.syncs[-1].problem) == (2, 2, "")

    play(test, 2, {"straggler_seconds": 0.2, "completions_per_replica": 4})


def test_replicas_that_come_up_late_are_waited_for_and_used(soon):
    async def test(one: Following) -> None:
        following = asyncio.create_task(one.follow(0))
        await asyncio.sleep(0.2)
        assert not following.done()
        assert "vllm.test has no address" in one.said[0]
        await one.served.start()
        one.served.publish(publication_of(0))
        one.served.replicas[0].load()
        await following
        first = one.served.replicas[0]
        first.seconds = 0.05
        working = asyncio.create_task(one.all([request(number) for number in range(40)]))
        await asyncio.sleep(0.1)
        second = await one.served.start(seconds=0.05)
        second.load()
        await working
        assert len(second.asked) > 5

    play(test, 0, {"completions_per_replica": 4})


def test_a_replica_that_dies_while_its_echo_is_waited_for_is_gone_on_without(soon):
    async def test(one: Following) -> None:
        dying, living = one.served.replicas
        dying.loads = False
        following = asyncio.create_task(one.follow(5))
        await asyncio.sleep(0.2)
        assert not following.done()
        await one.served.kill(dying)
        await asyncio.wait_for(following, 5)
        assert "Going on with 1 of 2 vLLM replicas" in one.said[-1]
        assert "127.0.0.61: its sidecar at port" in one.said[-1]
        await one.all([request(0)])
        assert living.asked
        assert not dying.asked

    play(test, 2, {"straggler_seconds": 30.0, "gone_seconds": 0.4})


def test_a_server_that_starts_anew_is_asked_again_when_its_sidecar_says_so(soon):
    async def test(one: Following) -> None:
        await one.follow(0)
        replica = one.served.replicas[0]
        loaded, replica.served = replica.served, []
        working = asyncio.create_task(one.all([request(0)]))
        await asyncio.sleep(0.4)
        assert not working.done()
        assert len(replica.asked) == 1  # the 404; no more until it has loaded them again
        assert any("No vLLM replica can be asked" in sentence for sentence in one.said)
        replica.served = loaded
        assert await working == [expected(request(0))]

    play(test)


def test_members_that_are_replaced_are_asked_for_by_their_childrens_names():
    async def test(one: Following) -> None:
        await one.follow(0)
        await one.engine.follow(1, (MEMBERS[0], Member("s0-g1", "student")))
        await one.all([request(0, member=0), request(1, member=1)])
        asked = {body["model"] for body in one.served.replicas[0].asked}
        assert asked == {adapter.name for adapter in publication_of(1, ("t0", "s0-g1")).adapters}

    play(test)


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [
        ("vllm", "vllm", 8000),
        ("vllm:9000", "vllm", 9000),
        ("http://127.0.0.1:9000", "127.0.0.1", 9000),
        ("http://[::1]:9000/", "::1", 9000),
    ],
)
def test_an_address_is_a_host_with_or_without_a_port(given, host, port):
    found = ServingAddress.parse(given, 8101)
    assert (found.host, found.port, found.sidecar_port) == (host, port, 8101)


@pytest.mark.parametrize(
    "given",
    [
        *("", "https://x", "http://x/v1", "x:port", "x:0", "http://u@x", "x:99999"),
        *("http://[::1", "::1", "a b", "x,y", "x" * 64),
    ],
)
def test_what_is_no_address_is_a_sentence(given):
    with pytest.raises(
        RolloutError, match=r"the address of vLLM is .*: http://HOST:PORT, HOST:PORT and HOST are allowed"
    ):
        ServingAddress.parse(given)


def test_the_work_of_a_wave_is_shared_by_load_and_not_by_order(soon):
    async def test(one: Following) -> Counter[str]:
        await one.follow()
        for replica in one.served.replicas:
            replica.seconds = 0.02
        await one.all([request(number, n=2) for number in range(60)])
        return Counter({replica.address: len(replica.asked) for replica in one.served.replicas})

    counts = play(test, 3, {"completions_per_replica": 8})
    assert sum(counts.values()) == 60
    assert min(counts.values()) >= 12
