"""Sampling from vLLM: every request goes to the replica with the least to do, and to another where that one fails."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import aiohttp
from aiohttp import AddrInfoType

from populora_trainer.errors import RolloutError, RolloutStoppedError
from populora_trainer.population.members import Member
from populora_trainer.rollout.engine import Completion, RolloutRequest, Wave, refuse_long_prompts
from populora_trainer.rollout.replicas import LOOK_AGAIN, Behind, Replica, Replicas, ServingAddress, Sync, in_words
from populora_trainer.rollout.vllm_protocol import LOWEST_TEMPERATURE, completions_of, request_body, sampled
from populora_trainer.storage.publication import Publication

_FIRST_NOTICE = 10.0  # seconds of waiting until the user is told; then after twice as long, and so on
_WRONG_ANSWERS = 3  # to one request, from whichever replicas, after which the run ends
_REFUSALS = (400, 401, 403, 413, 422)  # HTTP statuses that another try would get again
_STOP_AFTER = 10.0  # seconds without a replica after which a run that is asked to stop does
_FIRST_LOOK, _LONGEST_LOOK = 0.02, 0.5  # seconds between looks while waiting for an echo


class VllmEngine:
    """Samples from the population with vLLM servers that load its adapters from the run's storage.

    No completion is lost or doubled: sampling has no effects, a request that fails is asked anew as a whole, and its
    place is filled once. Draws are vLLM's own and differ from run to run.

    Args:
        address: of the servers.
        publish: stores the population's present weights and names them in the run's storage.
        end_ids: tokens that end a completion.
        max_prompt_tokens: longer prompts are refused.
        positions: of the base model, or None.
        vocabulary: number of tokens that the base model knows, or None.
        notice: told in a sentence what keeps the run waiting.
        on_sync: told how far the replicas are with a publication.
        stop: whether the end of the run is asked for; what is under way is finished, unless no replica is left.
        patience_seconds: how long nothing at all may come back, neither an echo nor a completion. A server takes half
            an hour to load a large base from far away.
        straggler_seconds: how long a replica that answers may be behind others; then the step begins without it.
        gone_seconds: the same for one whose sidecar cannot be reached.
        request_seconds: deadline of one request.
        completions_per_replica: that are asked for at a time.
    """

    def __init__(
        self,
        address: ServingAddress,
        publish: Callable[[int, Sequence[Member]], Publication],
        *,
        end_ids: Sequence[int],
        max_prompt_tokens: int,
        positions: int | None = None,
        vocabulary: int | None = None,
        notice: Callable[[str], None] = lambda sentence: None,
        on_sync: Callable[[Sync], None] = lambda sync: None,
        stop: Callable[[], bool] = lambda: False,
        patience_seconds: float = 1800.0,
        straggler_seconds: float = 60.0,
        gone_seconds: float = 5.0,
        request_seconds: float = 900.0,
        completions_per_replica: int = 256,
    ) -> None:
        self.address = address
        self.on_sync = on_sync
        self._publish = publish
        self._end_ids = sorted(set(end_ids))
        self._max_prompt_tokens, self._positions = max_prompt_tokens, positions
        self._vocabulary = vocabulary
        self._notice = notice
        self._stop = stop
        self._patience = patience_seconds
        self._straggler_seconds, self._gone_seconds = straggler_seconds, gone_seconds
        self._request_seconds = request_seconds
        self._replicas = Replicas(address, most_in_flight=completions_per_replica)
        self._adapters: list[str] = []
        self._answered_at = float("-inf")
        self._synced_after = 0.0

    async def follow(self, step: int, members: Sequence[Member]) -> None:
        """Publish the population's weights and wait until every replica serves them.

        Replicas that stay behind others are left out until they have caught up: one that has not echoed the newest
        publication is never asked for completions.

        Raises:
            RolloutError: no replica serves them for longer than the patience.
        """
        publication = self._publish(step, members)
        names = publication.names
        self._adapters = [names[member.name] for member in members]
        wait = _Wait(self._notice)
        what = f"the adapters of step {publication.step}"
        async with self._session() as session:
            await self._replicas.publish(session, publication)
            behind = await self._replicas.look(session)
            pause = _FIRST_LOOK
            while not self._replicas.synced or self._waited_for(behind, wait.seconds):
                problem = in_words(behind) or f"{self.address.host} has no address"
                if wait.seconds > self._patience:
                    raise RolloutError(
                        f"vLLM at {self.address} did not serve {what} for {self._patience:g} s: {problem}; the log of "
                        f"the sidecar beside it says more"
                    )
                if self._stop() and wait.seconds > _STOP_AFTER and not self._replicas.synced:
                    raise RolloutStoppedError(f"Stopped while no vLLM served {what} ({problem})")
                self._tell(wait.seconds, behind, waiting=True)
                wait.say(f"Waiting for vLLM at {self.address} to serve {what}, for {wait.seconds:.0f} s now: {problem}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_LOOK)
                behind = await self._replicas.look(session)
        self._synced_after = wait.seconds
        self._tell(wait.seconds, behind, waiting=False)
        if behind:
            self._notice(
                f"Going on with {len(self._replicas.synced)} of {len(self._replicas.all)} vLLM replicas after "
                f"{wait.seconds:.0f} s; the others follow when they serve {what}: {in_words(behind)}"
            )
        elif wait.said:
            self._notice(f"vLLM at {self.address} serves {what} after {wait.seconds:.0f} s")

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
        """Yield completions as requests are done; all that are done while the last wave was dealt with come together.

        Raises:
            RolloutError: a prompt is longer than allowed, vLLM refuses a request, or nothing comes back for longer than
                the patience.
        """
        refuse_long_prompts(requests, self._max_prompt_tokens, self._positions)
        for request in requests:
            if 0 < request.temperature < LOWEST_TEMPERATURE:
                raise RolloutError(
                    f"the temperature is {request.temperature:g}: vLLM samples at 0, and from {LOWEST_TEMPERATURE:g} on"
                )
        async with self._session() as session:
            watching = asyncio.create_task(self._watch(session))
            tasks = {asyncio.create_task(self._complete(session, one)): number for number, one in enumerate(requests)}
            pending = set(tasks)
            try:
                while pending:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    yield sorted(((tasks[task], task.result()) for task in done), key=lambda one: one[0])
            finally:
                # Those that are done too: several may have failed, and one error is what is told.
                for task in (watching, *tasks):
                    task.cancel()
                await asyncio.gather(watching, *tasks, return_exceptions=True)

    async def _complete(self, session: aiohttp.ClientSession, request: RolloutRequest) -> list[Completion]:
        """Return the request's completions, whichever replica they come from."""
        adapter, count = self._adapters[request.member], sampled(request)
        loop = asyncio.get_running_loop()
        since, wrong, avoided = loop.time(), 0, None
        failure = "no replica serves the newest adapters"
        while True:
            replica = await self._replicas.room(count, avoid=avoided, until=loop.time() + 1.0)
            if replica is not None:
                try:
                    completions = await self._ask(session, replica, request, adapter)
                    self._answered_at = loop.time()
                    replica.succeed()
                    return completions
                except _ReplicaError as error:
                    failure, avoided = f"{replica.address}: {error}", replica
                    wrong += error.wrong
                    if replica.fail(loop.time()):
                        others = len(self._replicas.all) > 1
                        then = "its requests go to the others" if others else "its requests are tried again"
                        self._notice(f"vLLM at {failure}; {then}")
                finally:
                    self._replicas.leave(replica, count)
            if wrong >= _WRONG_ANSWERS:
                raise RolloutError(f"vLLM answers one request {wrong} times with something else: {failure}")
            quiet = loop.time() - max(since, self._answered_at)
            if quiet > self._patience:
                raise RolloutError(f"vLLM at {self.address} completed nothing for {self._patience:g} s ({failure})")
            if quiet > _STOP_AFTER and not self._replicas.usable and self._stop():
                raise RolloutStoppedError(f"Stopped while no vLLM replica was of use ({failure})")

    async def _ask(
        self, session: aiohttp.ClientSession, replica: Replica, request: RolloutRequest, adapter: str
    ) -> list[Completion]:
        url = replica.url(self.address.port, "/v1/completions")
        try:
            body = request_body(request, adapter, self._end_ids)
            # Whoever a server would send us to is no replica that has echoed the publication.
            async with session.post(url, json=body, allow_redirects=False) as answer:
                status = answer.status
                if status == 200:
                    record = await answer.json(content_type=None)
                    return completions_of(record, request, adapter, self._end_ids, self._vocabulary)
                text = " ".join((await answer.text(errors="replace")).split())[:300]
        except TimeoutError as error:
            raise _ReplicaError(f"no answer within {self._request_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _ReplicaError(str(error) or type(error).__name__) from error
        except (ValueError, RecursionError) as error:  # no JSON, or another answer than was asked for
            raise _ReplicaError(str(error), wrong=True) from error
        if status == 404:
            replica.serves = None  # it has started anew; its sidecar tells when it is of use again
            raise _ReplicaError(f"it does not serve {adapter} any more ({text})")
        if status in _REFUSALS:
            raise RolloutError(f"vLLM at {replica.address} refuses a request with HTTP {status}: {text}")
        raise _ReplicaError(f"HTTP {status} {text}")

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Let replicas that come up or catch up be asked, until cancelled; of several watches one looks at a time."""
        wait = _Wait(self._notice)
        while True:
            if self._replicas.look_is_due:
                behind = await self._replicas.look(session)
                self._tell(self._synced_after, behind, waiting=False)
                if self._replicas.synced:
                    wait = _Wait(self._notice)
                else:
                    problem = in_words(behind) or f"{self.address.host} has no address"
                    wait.say(f"No vLLM replica can be asked for {wait.seconds:.0f} s now: {problem}")
            await asyncio.sleep(LOOK_AGAIN)

    def _waited_for(self, behind: Sequence[Behind], seconds: float) -> list[Behind]:
        """Return the replicas that are worth waiting for after so long, where others are ready."""
        return [one for one in behind if seconds <= (self._straggler_seconds if one.reachable else self._gone_seconds)]

    def _tell(self, seconds: float, behind: Sequence[Behind], *, waiting: bool) -> None:
        replicas, publication = self._replicas, self._replicas.publication
        assert publication is not None
        self.on_sync(
            Sync(publication.step, len(replicas.all), len(replicas.synced), seconds, waiting, in_words(behind))
        )

    def _session(self) -> aiohttp.ClientSession:
        # vLLM drops connections that are idle, so none is kept. A node that dies says nothing: probes find out.
        connector = aiohttp.TCPConnector(force_close=True, limit=0, socket_factory=_probing_socket)
        timeout = aiohttp.ClientTimeout(total=self._request_seconds, sock_connect=5.0)
        return aiohttp.ClientSession(connector=connector, timeout=timeout)


class _ReplicaError(Exception):
    """A replica did not do a request; another may. `wrong` where it answered with something else."""

    def __init__(self, text: str, *, wrong: bool = False) -> None:
        super().__init__(text)
        self.wrong = wrong


class _Wait:
    """How long something has taken so far; tells the user after 10 s, and then after twice as long each time."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice, self._next = notice, _FIRST_NOTICE
        self._since = time.monotonic()
        self.said = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def say(self, sentence: str) -> None:
        """Tell it, if it is time to."""
        if self.seconds >= self._next:
            self.said, self._next = True, 2 * self.seconds
            self._notice(sentence)


def _probing_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made
