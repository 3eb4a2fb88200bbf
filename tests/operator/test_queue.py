"""The work queue in virtual time."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from virtual_time import run

from populora_operator.queue import FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, Key, Work, WorkQueue

A: Key = ("ns", "a")
B: Key = ("ns", "b")


def test_a_key_that_is_added_often_is_worked_on_once() -> None:
    async def story() -> None:
        queue = WorkQueue()
        for _ in range(5):
            queue.add(A)
        queue.add(B)
        assert len(queue) == 2
        assert await queue.take() == Work(A, woken=True)
        assert await queue.take() == Work(B, woken=True)
        assert len(queue) == 0

    run(story())


def test_a_key_that_is_added_while_it_is_worked_on_is_worked_on_once_more() -> None:
    async def story() -> None:
        queue = WorkQueue()
        queue.add(A)
        work = await queue.take()
        queue.add(A)
        queue.add(A)
        queue.add(B)
        assert (await queue.take()).key == B, "A is taken and not done"
        queue.done(work.key)
        assert await queue.take() == Work(A, woken=True)
        queue.done(A)
        assert len(queue) == 0

    run(story())


def test_a_key_comes_at_the_earliest_of_the_times_that_were_asked_for() -> None:
    async def story() -> None:
        loop, queue = asyncio.get_running_loop(), WorkQueue()
        queue.add_after(A, 60)
        queue.add_after(A, 5)
        queue.add_after(A, 30)
        assert len(queue) == 0
        assert await queue.take() == Work(A, woken=False)
        assert loop.time() == 5
        queue.done(A)
        await asyncio.sleep(1000)
        assert len(queue) == 0, "the later times are forgotten"

    run(story())


def test_an_event_does_not_wait_for_the_time_of_its_key() -> None:
    async def story() -> None:
        queue = WorkQueue()
        queue.add_after(A, 600)
        queue.add(A)
        assert await queue.take() == Work(A, woken=True)
        assert asyncio.get_running_loop().time() == 0
        queue.done(A)
        await asyncio.sleep(1000)
        assert len(queue) == 0

    run(story())


def test_failures_wait_twice_as_long_each_time_up_to_a_limit_until_one_success() -> None:
    async def story() -> None:
        queue = WorkQueue()
        waits = [queue.fail(A) for _ in range(12)]
        assert waits[:3] == [FIRST_BACKOFF_SECONDS, 2 * FIRST_BACKOFF_SECONDS, 4 * FIRST_BACKOFF_SECONDS]
        assert waits[-1] == LAST_BACKOFF_SECONDS
        assert queue.fail(B) == FIRST_BACKOFF_SECONDS, "each key has failures of its own"
        queue.succeed(A)
        assert queue.fail(A) == FIRST_BACKOFF_SECONDS
        assert queue.fail(A, at_least=7) == 7, "the API server asks for more"
        queue.close()

    run(story())


def test_a_forgotten_key_does_not_come_back() -> None:
    async def story() -> None:
        queue = WorkQueue()
        queue.fail(A)
        queue.forget(A)
        await asyncio.sleep(1000)
        assert len(queue) == 0
        assert queue.fail(A) == FIRST_BACKOFF_SECONDS
        queue.close()

    run(story())


_ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "after", "fail", "sleep"]), st.integers(0, 3), st.floats(0, 5)), max_size=40
)


@given(_ACTIONS, st.integers(1, 4), st.floats(0, 3))
def test_no_key_is_worked_on_twice_at_a_time_and_none_is_lost(
    actions: list[tuple[str, int, float]], workers: int, effort: float
) -> None:
    async def story() -> None:
        queue, working, last_seen = WorkQueue(), Counter[Key](), dict[Key, float]()
        loop = asyncio.get_running_loop()

        async def work() -> None:
            while True:
                item = await queue.take()
                working[item.key] += 1
                assert working[item.key] == 1, "two workers have the key"
                last_seen[item.key] = loop.time()
                await asyncio.sleep(effort)
                working[item.key] -= 1
                queue.done(item.key)

        pool = [asyncio.create_task(work()) for _ in range(workers)]
        asked: dict[Key, float] = {}
        for action, number, seconds in actions:
            key = ("ns", str(number))
            match action:
                case "add":
                    queue.add(key)
                    asked[key] = loop.time()
                case "after":
                    queue.add_after(key, seconds)
                    asked[key] = loop.time()
                case "fail":
                    queue.fail(key)
                    asked[key] = loop.time()
                case _:
                    await asyncio.sleep(seconds)
        await asyncio.sleep(10_000)
        for key, time in asked.items():
            assert last_seen[key] >= time, "what was asked for last was not followed by a look"
        assert all(not task.done() for task in pool)
        for task in pool:
            task.cancel()

    run(story())
