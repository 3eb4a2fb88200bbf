"""The in-process verifier: a pool of zygotes, fed and judged by one thread.

That thread is the deciding side. It parses literals and compares texts, and runs no code of any program. Each worker
is a pair of lanes, one for first runs and one for further, varied ones, so that `workers` hanging programs stall the
pool for one timeout, and honest programs beside them wait for nothing else.

The programs of a batch are compiled some at a time in a child that runs none of them, as a compiler is slow in a
process that was just forked; see program.py. One that the compiler hangs or ends on is left to its own runs.

Lanes are shared out by time (turns.py): who sends programs that hang, in their first run or in their second, waits
longer, and nobody else does. A run that is killed from outside, by the kernel's out-of-memory killer or an operator's
hand, is made again. Where that happens again and again, a program that does nothing is run: only if that one lives is
the program to blame.
"""

import asyncio
import concurrent.futures
import contextlib
import heapq
import os
import secrets
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Self

from populora_trainer.errors import SandboxError
from populora_trainer.sandbox import judging, policy
from populora_trainer.sandbox.crew import Crew
from populora_trainer.sandbox.judging import Outcome, Program, Run
from populora_trainer.sandbox.lane import PIPE_BYTES
from populora_trainer.sandbox.program import FRAME, MAX_CODE_BYTES, Compilation, Job
from populora_trainer.sandbox.turns import ClientTurns
from populora_trainer.sandbox.verdicts import Case, Judgement, Limits, Verdict
from populora_trainer.sandbox.zygote import WALL_FACTOR

# The same everywhere, so that a verdict is too. What varies from program to program is in variation.py.
HASH_SEEDS = (15, 55)
_FURTHER_TIME = 2  # timeouts that one further run may take: it calls one input more, and sets take longer
# All further runs together: so many times what the first run took, and so many timeouts.
_FURTHER_TIMES, _FURTHER_TIMEOUTS = 16, 1
_MOST_TIMEOUTS = 6  # timeouts that all runs may take
_NONCE_BYTES = 8
_GRACE_SECONDS = 10.0  # beyond a run's last moment, after which its zygote counts as stuck
_ATTEMPTS = 5  # of a run that is killed from outside, before a program that does nothing is run in its place
_PAUSES = (0.0, 0.2, 0.8, 3.2)  # seconds before each attempt but the first
_PATIENCE = 60.0  # seconds in which no run can be made, after which judgements fail
_BEAT = 15.0  # seconds in which the deciding thread does not turn, after which something is wrong
# How a process ends by its own doing. It can send no signal; any other comes from outside.
_OWN_SIGNALS = frozenset(
    {
        signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP,
        signal.SIGXCPU, signal.SIGXFSZ,
    }
)  # fmt: skip
_COMPILED_TOGETHER = 16  # programs at most
_COMPILED_CHARS = 1 << 16  # of them together, where there is more than one
_COMPILE_SECONDS = 0.5  # of processor time for them together; a run's timeout where that is less
_WORTH_COMPILING = 3  # runs under the first hash seed that wait for it


class SandboxPool:
    """Judges cases in isolated processes on this machine; safe to share between threads and event loops.

    Use it as a context manager, or call `close`. No process and no file outlives it, not even when this process is
    killed.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        timeout_seconds: float = 10.0,
        memory_mib: int = 512,
        max_output_chars: int = 4096,
        max_program_chars: int = 32_768,
        allow_missing: Collection[str] = (),
        seed: int = 0,
    ) -> None:
        """Start the workers.

        Args:
            workers: programs that may make their first run at a time, and as many their further ones; default:
                processors of this process.
            timeout_seconds: processor time of a first run, and a third of its wall time. A further one has twice that;
                all further ones have 16 times what the first took and one timeout more, five timeouts at most.
            memory_mib: address space of a program, in MiB.
            max_output_chars: longest canonical output, input and literal answer.
            max_program_chars: longest program.
            allow_missing: isolation layers that may be absent, by name; see kernel.py.
            seed: of the training run; what varies between the runs of a program follows from it and the program.

        Raises:
            SandboxError: a required layer is missing here and not allowed to be, or a worker does not start.
        """
        self.limits = Limits(timeout_seconds, memory_mib, max_output_chars, max_program_chars)
        self.workers = workers or len(
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        )
        self.seed = seed
        self._dispatcher = _Dispatcher(self.limits, self.workers, frozenset(allow_missing))
        self._dispatcher.start()
        self.missing_layers = self._dispatcher.ready.result()

    async def judge(self, cases: Sequence[Case], *, seed: int | None = None, client: Hashable = "") -> list[Judgement]:
        """Return one judgement per case, in order. Identical runs within one call are made once.

        Args:
            cases: the questions.
            seed: in place of the pool's.
            client: who asks. The workers' time is shared out equally among clients, and for each among its calls.

        Raises:
            SandboxError: the pool is closed, or for a minute no program could be run.
            ValueError: a case carries outputs that do not match its inputs in number.
        """
        own = self.seed if seed is None else seed
        return await asyncio.wrap_future(self._dispatcher.submit(cases, own, client))

    def trouble(self, patience: float = 0.0) -> str | None:
        """Return why programs cannot be run here, where that has been so for longer than the patience in seconds.

        Programs that hang are no trouble: each ends at its deadline.
        """
        return self._dispatcher.trouble(patience)

    @property
    def restarts(self) -> int:
        """How many workers were put in the place of others so far."""
        return self._dispatcher.restarts

    @property
    def ran_at(self) -> float:
        """The moment, on the monotonic clock, since which workers of every kind have brought a run to its end."""
        return self._dispatcher.ran_at

    def close(self) -> None:
        """End all workers and wait until they are gone; pending judgements fail. May be called twice."""
        self._dispatcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(eq=False)
class _Batch:
    cases: Sequence[Case]
    seed: int
    client: Hashable
    future: "concurrent.futures.Future[list[Judgement]]"
    judgements: list[Judgement | None]
    since: float = field(default_factory=time.monotonic)
    next_case: int = 0
    open_cases: int = 0
    executions: dict[Run, "_Execution"] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    fresh: deque["_Execution"] = field(default_factory=deque)  # whose program might be compiled first
    ready: tuple[deque["_Execution"], ...] = field(default_factory=lambda: tuple(deque() for _ in HASH_SEEDS))


@dataclass(eq=False)
class _Execution:
    """A program with its inputs on its way through all runs it needs, with the cases that wait for it.

    Attributes:
        number: of the run that is under way or next, from 0.
        known: what those before it came to.
        outcome: what all of them came to.
        allowed: seconds of processor time that the further runs may still take.
    """

    run: Run
    program: Program
    batch: _Batch
    waiting: list[tuple[int, Generator[Run, Outcome, Judgement]]]
    number: int = 0
    known: Outcome | None = None
    outcome: Outcome | None = None
    allowed: float = 0.0
    attempts: int = 0  # of the present run, that were killed from outside
    suspect: "_Execution | None" = None  # whose innocence this one, a program that does nothing, is to prove
    nonce: bytes = b""
    deadline: float = 0.0
    max_record: int = 0
    started: float = 0.0


@dataclass(eq=False)
class _Compiling:
    """Programs that are being compiled, and the executions that wait for them."""

    batch: _Batch
    executions: list[_Execution]
    programs: list[Program]
    nonce: bytes
    deadline: float
    max_record: int
    started: float = 0.0


class _Dispatcher(threading.Thread):
    """Owns the lanes. Everything but `submit` and `close` happens in this thread.

    Zygotes are started by this thread and ask the kernel to be killed when it ends, however it ends.
    """

    def __init__(self, limits: Limits, workers: int, allow_missing: frozenset[str]) -> None:
        super().__init__(name="verifier", daemon=True)
        self.ready: concurrent.futures.Future[dict[str, str]] = concurrent.futures.Future()
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._crew = Crew(HASH_SEEDS, workers, limits.memory_mib, allow_missing, self._selector)
        self._running: dict[int, _Execution | _Compiling] = {}
        self._turns: list[ClientTurns[Hashable, _Batch]] = [ClientTurns(limits.timeout_seconds) for _ in HASH_SEEDS]
        self._paused: list[tuple[float, int, int, _Execution]] = []  # when to go on, a number, under which seed, what
        self._pauses = count()
        self._open: set[_Batch] = set()
        self._broken: set[int] = set()  # lanes to replace
        self._inbox: deque[_Batch] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._beat = time.monotonic()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def submit(
        self, cases: Sequence[Case], seed: int, client: Hashable
    ) -> "concurrent.futures.Future[list[Judgement]]":
        """Queue a batch; from any thread."""
        batch = _Batch(tuple(cases), seed, client, concurrent.futures.Future(), [None] * len(cases))
        if not cases:
            batch.future.set_result([])
            return batch.future
        with self._lock:
            if self._closing:
                raise SandboxError("the verifier is closed")
            self._inbox.append(batch)
            self._wake()
        return batch.future

    def trouble(self, patience: float) -> str | None:
        """Return why programs cannot be run, if they cannot; from any thread."""
        now = time.monotonic()
        if not self.is_alive():
            return "the verifier is closed"
        if now - self._beat > _BEAT:
            return f"the verifier's thread has not turned for {now - self._beat:.0f} s"
        return self._crew.trouble(now, patience)

    @property
    def restarts(self) -> int:
        """Workers that were put in the place of others."""
        return self._crew.restarts

    @property
    def ran_at(self) -> float:
        """When workers of every kind had last finished a run."""
        return min(self._crew.finished_at)

    def close(self) -> None:
        """End the thread; from any thread."""
        with self._lock:
            self._closing = True
            if self.is_alive():
                self._wake()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def run(self) -> None:
        """Serve until closed."""
        failure: BaseException = SandboxError("the verifier was closed before it had judged the case")
        try:
            self.ready.set_result(self._crew.start_all())
            self._selector.register(self._wake_read, selectors.EVENT_READ, None)
            while not self._closing:
                self._turn()
        except BaseException as error:
            failure = error
            if not self.ready.done():
                self.ready.set_exception(error)
        finally:
            self._shut_down(failure)

    def _shut_down(self, failure: BaseException) -> None:
        with self._lock:
            self._closing = True
        self._crew.close()
        for batch in {*self._open, *self._inbox}:
            self._fail(batch, failure)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # Serving

    def _turn(self) -> None:
        now = self._beat = time.monotonic()
        for key, _ in self._selector.select(self._next_turn(now)):
            if key.data is None:
                self._receive()
            elif self._crew.starts(key.data):
                self._crew.admit(key.data)
            elif key.fd == self._crew.lane(key.data).result_fd:
                self._collect(key.data)
            else:
                self._finish(key.data)
        now = time.monotonic()
        self._broken |= {index for index, running in self._running.items() if running.deadline < now}
        while self._broken:
            self._lose(self._broken.pop())
        self._crew.turn(now)
        while self._paused and self._paused[0][0] <= now:
            _, _, stage, execution = heapq.heappop(self._paused)
            execution.batch.ready[stage].appendleft(execution)
            self._queue(stage, execution.batch)
        if self._open and (reason := self._crew.trouble(now, _PATIENCE)):
            for batch in [one for one in self._open if now - one.since > _PATIENCE]:
                self._fail(batch, SandboxError(f"for {_PATIENCE:g} s no program could be run: {reason}"))
        self._dispatch()

    def _next_turn(self, now: float) -> float:
        seconds = self._crew.next_turn(now)
        return max(0.0, min(seconds, self._paused[0][0] - now)) if self._paused else seconds

    def _collect(self, index: int) -> None:
        lane, running = self._crew.lane(index), self._running.get(index)
        if running and not lane.collect(running.max_record):
            self._selector.unregister(lane.result_fd)  # the program now waits for its deadline

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._inbox:
            batch = self._inbox.popleft()
            self._queue(0, batch)
            self._open.add(batch)

    def _lose(self, index: int) -> None:
        """Let a lane be replaced that is gone or stuck, and make again the run that it was making."""
        running = self._running.pop(index, None)
        self._crew.lost(index, running=running is not None)
        if running is None:
            return
        self._end(index, running)
        if isinstance(running, _Compiling):
            self._compiled(running)
        else:
            self._again(index % len(HASH_SEEDS), running)

    def _again(self, stage: int, execution: _Execution) -> None:
        """Make a run again that was killed from outside; soon, and later where that does not help."""
        if execution.suspect:
            execution = execution.suspect  # the machine kills a program that does nothing
            execution.attempts = 0
        execution.attempts += 1
        if execution.attempts == _ATTEMPTS:
            innocent = Run("def f():\n    return None\n", ("",))
            execution = _Execution(innocent, Program(innocent.program), execution.batch, [], suspect=execution)
        moment = time.monotonic() + _PAUSES[min(execution.attempts, len(_PAUSES)) - 1]
        heapq.heappush(self._paused, (moment, next(self._pauses), stage, execution))

    def _dispatch(self) -> None:
        for stage in range(len(HASH_SEEDS) - 1, -1, -1):  # what is nearly done first
            turns, idle = self._turns[stage], self._crew.idle[stage]
            while idle and (batch := turns.first()) is not None:
                if batch.future.done():  # cancelled or failed
                    self._forget(batch)
                elif not self._start_next(stage, batch):
                    turns.drop(batch.client, batch)

    def _queue(self, stage: int, batch: _Batch) -> None:
        self._turns[stage].put(batch.client, batch)

    def _forget(self, batch: _Batch) -> None:
        self._open.discard(batch)
        for turns in self._turns:
            turns.leave(batch.client, batch)

    def _start_next(self, stage: int, batch: _Batch) -> bool:
        """Give an idle lane the next work of a batch; return whether there is more."""
        ready, idle = batch.ready[stage], self._crew.idle[stage]
        if stage:
            if ready:
                self._launch(idle.pop(), ready.popleft())
            return bool(ready)
        while (
            batch.next_case < len(batch.cases)
            and not ready
            and len(batch.fresh) < _COMPILED_TOGETHER
            and not batch.future.done()
        ):
            index = batch.next_case
            batch.next_case += 1
            batch.open_cases += 1
            self._advance(batch, index, judging.judge(batch.cases[index], self._limits), None)
        if batch.future.done():  # nothing needed a run, or a case was at fault
            return False
        while batch.fresh and batch.fresh[0].program.tried:
            ready.append(batch.fresh.popleft())
        if ready:
            self._launch(idle.pop(), ready.popleft())
        elif len(batch.fresh) >= _WORTH_COMPILING:
            self._launch_compilation(idle.pop(), batch)
        elif batch.fresh:
            self._launch(idle.pop(), batch.fresh.popleft())
        return bool(ready or batch.fresh) or batch.next_case < len(batch.cases)

    def _advance(
        self, batch: _Batch, index: int, steps: Generator[Run, Outcome, Judgement], outcome: Outcome | None
    ) -> None:
        """Carry a case on until it is decided or needs a run."""
        try:
            while True:
                run = next(steps) if outcome is None else steps.send(outcome)
                execution = batch.executions.get(run)
                if execution is None:
                    program = batch.programs.setdefault(run.program, Program(run.program))
                    execution = batch.executions[run] = _Execution(run, program, batch, [])
                    self._schedule(execution)
                if execution.outcome is None:
                    execution.waiting.append((index, steps))
                    return
                outcome = execution.outcome
        except StopIteration as stop:
            batch.judgements[index] = stop.value
        except Exception as error:
            self._fail(batch, error)
        batch.open_cases -= 1
        if batch.next_case == len(batch.cases) and not batch.open_cases:
            self._forget(batch)
            if not batch.future.done() and batch.future.set_running_or_notify_cancel():
                batch.future.set_result([judgement for judgement in batch.judgements if judgement is not None])

    def _schedule(self, execution: _Execution) -> None:
        """Let a first run be started, or settle it where its program is refused."""
        program, batch = execution.program, execution.batch
        if program.refusal:
            self._settle(execution, program.refusal)
            return
        (batch.ready[0] if program.tried else batch.fresh).append(execution)
        self._queue(0, batch)

    def _launch(self, index: int, execution: _Execution) -> None:
        run, program, number = execution.run, execution.program, execution.number
        timeout = self._limits.timeout_seconds
        if number:
            timeout = min(_FURTHER_TIME * timeout, execution.allowed)
        execution.nonce = secrets.token_bytes(_NONCE_BYTES)
        execution.deadline = self._deadline(timeout)
        # A character of a literal takes up to four bytes.
        execution.max_record = 1024 + (len(run.inputs) + 1) * (4 * self._limits.max_output_chars + 1)
        check = not number and program.code is None and not policy.is_plain(program.source)
        source = program.source if program.code is None else program.code
        key = run.key(execution.batch.seed) if number else 0
        job = Job((execution.nonce, check, source, run.packed_inputs, self._limits.max_output_chars, number, key))
        self._start(index, execution, job.wire, timeout)

    def _launch_compilation(self, index: int, batch: _Batch) -> None:
        """Have the programs that the batch's next runs need compiled, as many as go together."""
        programs: list[Program] = []
        executions: list[_Execution] = []
        chars = 0
        while batch.fresh:
            program = batch.fresh[0].program
            if not program.tried:
                chars += len(program.source)
                if len(programs) == _COMPILED_TOGETHER or (programs and chars > _COMPILED_CHARS):
                    break
                program.tried = True
                programs.append(program)
            executions.append(batch.fresh.popleft())
        seconds = min(_COMPILE_SECONDS, self._limits.timeout_seconds)
        compiling = _Compiling(
            batch,
            executions,
            programs,
            nonce=secrets.token_bytes(_NONCE_BYTES),
            deadline=self._deadline(seconds),
            max_record=_NONCE_BYTES + len(programs) * (FRAME.size + MAX_CODE_BYTES),
        )
        sources = tuple([(not policy.is_plain(program.source), program.source) for program in programs])
        self._start(index, compiling, Compilation((compiling.nonce, sources)).wire, seconds)

    def _deadline(self, timeout: float) -> float:
        return time.monotonic() + WALL_FACTOR * timeout + _GRACE_SECONDS

    def _start(self, index: int, work: _Execution | _Compiling, job: bytes, timeout: float) -> None:
        lane = self._crew.lane(index)
        self._running[index] = work
        work.started = time.monotonic()
        self._turns[index % len(HASH_SEEDS)].begin(work.batch.client, work.batch)
        if work.max_record > PIPE_BYTES:
            self._selector.register(lane.result_fd, selectors.EVENT_READ, index)
        try:
            lane.start(index, job, timeout)
        except OSError:
            self._broken.add(index)
            self._wake()  # to the top of the next turn

    def _compiled(self, compiling: _Compiling) -> None:
        """Go on with the executions that waited for a compilation, whatever came of it."""
        for execution in compiling.executions:
            self._schedule(execution)

    def _end(self, index: int, work: _Execution | _Compiling) -> None:
        seconds = time.monotonic() - work.started
        self._turns[index % len(HASH_SEEDS)].end(work.batch.client, work.batch, seconds)

    def _finish(self, index: int) -> None:
        lane = self._crew.lane(index)
        execution = self._running.get(index)
        message = lane.done(execution.max_record) if execution else None
        if message is None or execution is None:
            self._broken.add(index)
            return
        _, late, status, seconds, record = message
        del self._running[index]
        with contextlib.suppress(KeyError):
            self._selector.unregister(lane.result_fd)
        code = os.waitstatus_to_exitcode(status)
        killed = not late and code < 0 and -code not in _OWN_SIGNALS
        self._crew.finished(index, killed=killed)
        self._end(index, execution)
        stage = index % len(HASH_SEEDS)
        if isinstance(execution, _Compiling):
            judging.read_compiled(record, execution.nonce, execution.programs)
            self._compiled(execution)
        elif killed:
            self._again(stage, execution)
        elif execution.suspect:
            detail = f"killed from outside {_ATTEMPTS} times, where a program that does nothing was not"
            self._settle(execution.suspect, Outcome(Verdict.CRASHED, detail=detail))
        else:
            self._advance_run(execution, self._outcome(execution, late, code, record), seconds)

    def _advance_run(self, execution: _Execution, outcome: Outcome, seconds: float) -> None:
        """Carry an execution on to its next run, or settle it; the last one took so much processor time."""
        execution.attempts = 0
        timeout = self._limits.timeout_seconds
        if execution.number:
            execution.allowed = max(execution.allowed - seconds, 0.001)  # no run takes less
        else:
            allowed = _FURTHER_TIMES * seconds + _FURTHER_TIMEOUTS * timeout
            execution.allowed = min(allowed, _MOST_TIMEOUTS * timeout - seconds)
        execution.known = outcome if execution.known is None else judging.join(execution.known, outcome)
        execution.number += 1
        if judging.needs_run(execution.number, execution.known):
            execution.batch.ready[1].append(execution)
            self._queue(1, execution.batch)
        else:
            self._settle(execution, execution.known)

    def _outcome(self, execution: _Execution, late: bool, code: int, record: bytes) -> Outcome:
        if late or code == -signal.SIGXCPU:
            detail = f"still running after {self._limits.timeout_seconds:g} s"
            return Outcome(Verdict.TIMEOUT, detail="its further runs take too long" if execution.number else detail)
        if code < 0:
            return Outcome(Verdict.CRASHED, detail=f"killed by {signal.Signals(-code).name}")
        if code > 0:
            return Outcome(Verdict.CRASHED, detail=f"exited with status {code}")
        return judging.read_record(record, execution.nonce, execution.run, execution.number, self._limits)

    def _settle(self, execution: _Execution, outcome: Outcome) -> None:
        execution.outcome = outcome
        waiting, execution.waiting = execution.waiting, []
        for index, steps in waiting:
            self._advance(execution.batch, index, steps, outcome)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        self._forget(batch)
        if not batch.future.done() and batch.future.set_running_or_notify_cancel():
            batch.future.set_exception(error)
