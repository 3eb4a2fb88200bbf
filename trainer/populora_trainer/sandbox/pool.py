"""The in-process verifier: a pool of zygotes under two hash seeds, fed and judged by one thread.

That thread is the deciding side. It parses literals and compares texts, and runs no code of any program. Each worker
is a pair of lanes, one per hash seed, so that `workers` hanging programs stall the pool for one timeout, and honest
programs beside them wait for nothing else.

The programs of a batch are compiled some at a time in a child that runs none of them, as a compiler is slow in a
process that was just forked; see program.py. One that the compiler hangs or ends on is left to its own runs.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import secrets
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from populora_trainer.errors import SandboxError
from populora_trainer.sandbox import judging, policy
from populora_trainer.sandbox.judging import Outcome, Program, Run
from populora_trainer.sandbox.kernel import OPTIONAL_LAYERS
from populora_trainer.sandbox.lane import PIPE_BYTES, Lane
from populora_trainer.sandbox.program import FRAME, MAX_CODE_BYTES, Compilation, Job
from populora_trainer.sandbox.verdicts import Case, Judgement, Limits, Verdict
from populora_trainer.sandbox.zygote import WALL_FACTOR

# Of the first 160 seeds the two under which sets of two common words most often differ in order: 65 %, half for most.
HASH_SEEDS = (15, 55)
_NONCE_BYTES = 8
_GRACE_SECONDS = 10.0  # beyond a run's last moment, after which its zygote counts as stuck
_MAX_STARTS = 3  # in a row without a finished run
_ATTEMPTS = 2  # of a run whose zygote ended under it
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
    ) -> None:
        """Start the workers.

        Args:
            workers: programs that may run at a time under each hash seed; default: processors of this process.
            timeout_seconds: processor time of one run, and a third of its wall time; a proposal takes two runs.
            memory_mib: address space of a program, in MiB.
            max_output_chars: longest canonical output, input and literal answer.
            max_program_chars: longest program.
            allow_missing: isolation layers that may be absent, by name; see kernel.py.

        Raises:
            SandboxError: a required layer is missing here and not allowed to be, or a worker does not start.
        """
        self.limits = Limits(timeout_seconds, memory_mib, max_output_chars, max_program_chars)
        self.workers = workers or len(
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        )
        self._dispatcher = _Dispatcher(self.limits, self.workers, frozenset(allow_missing))
        self._dispatcher.start()
        self.missing_layers = self._dispatcher.ready.result()

    async def judge(self, cases: Sequence[Case]) -> list[Judgement]:
        """Return one judgement per case, in order. Identical runs within one call are made once.

        Raises:
            SandboxError: the pool is closed, or its workers cannot be kept alive.
            ValueError: a case carries outputs that do not match its inputs in number.
        """
        return await asyncio.wrap_future(self._dispatcher.submit(cases))

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
    future: "concurrent.futures.Future[list[Judgement]]"
    judgements: list[Judgement | None]
    next_case: int = 0
    open_cases: int = 0
    executions: dict[Run, "_Execution"] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    fresh: deque["_Execution"] = field(default_factory=deque)  # whose program might be compiled first
    ready: deque["_Execution"] = field(default_factory=deque)
    queued: bool = True


@dataclass(eq=False)
class _Execution:
    """A run on its way through both seeds, with the cases that wait for it."""

    run: Run
    program: Program
    batch: _Batch
    waiting: list[tuple[int, Generator[Run, Outcome, Judgement]]]
    first: Outcome | None = None
    outcome: Outcome | None = None
    attempts: int = 0
    nonce: bytes = b""
    deadline: float = 0.0
    max_record: int = 0


@dataclass(eq=False)
class _Compiling:
    """Programs that are being compiled, and the executions that wait for them."""

    batch: _Batch
    executions: list[_Execution]
    programs: list[Program]
    nonce: bytes
    deadline: float
    max_record: int


class _Dispatcher(threading.Thread):
    """Owns the lanes. Everything but `submit` and `close` happens in this thread.

    Zygotes are started by this thread and ask the kernel to be killed when it ends, however it ends.
    """

    def __init__(self, limits: Limits, workers: int, allow_missing: frozenset[str]) -> None:
        super().__init__(name="verifier", daemon=True)
        self.ready: concurrent.futures.Future[dict[str, str]] = concurrent.futures.Future()
        self._limits = limits
        self._allow_missing = allow_missing
        self._workers = workers
        self._selector = selectors.DefaultSelector()
        self._lanes: list[Lane | None] = [None] * (2 * workers)  # the seed of lane i is i % 2
        self._running: dict[int, _Execution | _Compiling] = {}
        self._idle: tuple[set[int], set[int]] = (set(), set())
        self._second_runs: deque[_Execution] = deque()
        self._batches: deque[_Batch] = deque()  # with first runs to start; they take turns
        self._open: set[_Batch] = set()
        self._broken: set[int] = set()  # lanes to replace
        self._starts = 0
        self._inbox: deque[_Batch] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def submit(self, cases: Sequence[Case]) -> "concurrent.futures.Future[list[Judgement]]":
        """Queue a batch; from any thread."""
        batch = _Batch(tuple(cases), concurrent.futures.Future(), [None] * len(cases))
        if not cases:
            batch.future.set_result([])
            return batch.future
        with self._lock:
            if self._closing:
                raise SandboxError("the verifier is closed")
            self._inbox.append(batch)
            self._wake()
        return batch.future

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
            self.ready.set_result(self._start_all())
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
        for lane in self._lanes:
            if lane:
                lane.kill()
        for batch in {*self._open, *self._inbox}:
            self._fail(batch, failure)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # Starting

    def _start_all(self) -> dict[str, str]:
        for index in range(len(self._lanes)):
            self._lanes[index] = self._spawn(index)
        missing: dict[str, str] = {}
        for index in range(len(self._lanes)):
            missing |= self._admit(index)
        return missing

    def _spawn(self, index: int) -> Lane:
        try:
            return Lane(HASH_SEEDS[index % 2], self._limits.memory_mib)
        except OSError as error:
            raise SandboxError(f"a verifier worker cannot be started: {error}") from error

    def _admit(self, index: int) -> dict[str, str]:
        """Wait until a lane is ready and take it into service; return the layers that it does without, and why."""
        lane = self._lane(index)
        try:
            report = lane.finish_start()
        except SandboxError:
            self._lanes[index] = None
            raise
        missing = {layer: reason for layer, reason in report.items() if reason is not None}
        lacking = {
            layer: reason
            for layer, reason in missing.items()
            if layer not in self._allow_missing and layer not in OPTIONAL_LAYERS
        }
        if lacking:
            listed = "; ".join(f"{layer} ({reason})" for layer, reason in lacking.items())
            flags = " ".join(f"--allow-missing {layer}" for layer in lacking)
            raise SandboxError(
                f"the verifier's isolation lacks {listed}; programs are not run without it unless told: {flags}"
            )
        self._selector.register(lane.control, selectors.EVENT_READ, index)
        self._idle[index % 2].add(index)
        return missing

    def _replace(self, index: int) -> None:
        """Put a new zygote in the place of one that is gone or stuck, and run again what it was running."""
        lane = self._lanes[index]
        self._lanes[index] = None
        if lane:
            self._selector.unregister(lane.control)
            with contextlib.suppress(KeyError):
                self._selector.unregister(lane.result_fd)
            lane.kill()
        self._idle[index % 2].discard(index)
        running = self._running.pop(index, None)
        self._starts += 1
        if self._starts > _MAX_STARTS:
            raise SandboxError(f"verifier workers ended {_MAX_STARTS} times in a row without finishing a run")
        self._lanes[index] = self._spawn(index)
        self._admit(index)
        if isinstance(running, _Compiling):
            self._compiled(running)
        elif running:
            running.attempts += 1
            if running.attempts >= _ATTEMPTS:
                self._settle(running, Outcome(Verdict.CRASHED, detail="its worker ended with it, twice"))
            elif index % 2 == 0:
                running.batch.ready.appendleft(running)
                self._queue(running.batch)
            else:
                self._second_runs.appendleft(running)

    # Serving

    def _turn(self) -> None:
        for key, _ in self._selector.select(1.0 if self._running else None):
            if key.data is None:
                self._receive()
            elif key.fd == self._lane(key.data).result_fd:
                self._collect(key.data)
            else:
                self._finish(key.data)
        now = time.monotonic()
        self._broken |= {index for index, running in self._running.items() if running.deadline < now}
        while self._broken:
            self._replace(self._broken.pop())
        self._dispatch()

    def _lane(self, index: int) -> Lane:
        lane = self._lanes[index]
        assert lane is not None
        return lane

    def _collect(self, index: int) -> None:
        lane, running = self._lane(index), self._running.get(index)
        if running and not lane.collect(running.max_record):
            self._selector.unregister(lane.result_fd)  # the program now waits for its deadline

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._inbox:
            batch = self._inbox.popleft()
            self._batches.append(batch)
            self._open.add(batch)

    def _dispatch(self) -> None:
        while self._second_runs and self._idle[1]:
            execution = self._second_runs.popleft()
            if execution.batch.future.done():  # cancelled or failed
                self._open.discard(execution.batch)
            else:
                self._launch(self._idle[1].pop(), execution)
        while self._batches and self._idle[0]:
            batch = self._batches.popleft()
            batch.queued = False
            if batch.future.done():
                self._open.discard(batch)
            elif self._start_next(batch):
                self._queue(batch)

    def _queue(self, batch: _Batch) -> None:
        if not batch.queued:
            batch.queued = True
            self._batches.append(batch)

    def _start_next(self, batch: _Batch) -> bool:
        """Give an idle lane the next work of a batch; False where there is none at this time."""
        while (
            batch.next_case < len(batch.cases)
            and not batch.ready
            and len(batch.fresh) < _COMPILED_TOGETHER
            and not batch.future.done()
        ):
            index = batch.next_case
            batch.next_case += 1
            batch.open_cases += 1
            self._advance(batch, index, judging.judge(batch.cases[index], self._limits), None)
        while batch.fresh and batch.fresh[0].program.tried:
            batch.ready.append(batch.fresh.popleft())
        if batch.ready:
            self._launch(self._idle[0].pop(), batch.ready.popleft())
        elif len(batch.fresh) >= _WORTH_COMPILING:
            self._launch_compilation(self._idle[0].pop(), batch)
        elif batch.fresh:
            self._launch(self._idle[0].pop(), batch.fresh.popleft())
        return bool(batch.ready or batch.fresh) or batch.next_case < len(batch.cases)

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
            self._open.discard(batch)
            if not batch.future.done() and batch.future.set_running_or_notify_cancel():
                batch.future.set_result([judgement for judgement in batch.judgements if judgement is not None])

    def _schedule(self, execution: _Execution) -> None:
        """Let a first run be started, or settle it where its program is refused."""
        program, batch = execution.program, execution.batch
        if program.refusal:
            self._settle(execution, program.refusal)
            return
        (batch.ready if program.tried else batch.fresh).append(execution)
        self._queue(batch)

    def _launch(self, index: int, execution: _Execution) -> None:
        second = index % 2 == 1
        run, program = execution.run, execution.program
        execution.nonce = secrets.token_bytes(_NONCE_BYTES)
        execution.deadline = self._deadline(self._limits.timeout_seconds)
        # A character of a literal takes up to four bytes.
        execution.max_record = 1024 + len(run.inputs) * (4 * self._limits.max_output_chars + 1)
        check = not second and program.code is None and not policy.is_plain(program.source)
        source = program.source if program.code is None else program.code
        job = Job((execution.nonce, check, source, run.job_inputs(second), self._limits.max_output_chars))
        self._start(index, execution, job.wire, self._limits.timeout_seconds)

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
        lane = self._lane(index)
        self._running[index] = work
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

    def _finish(self, index: int) -> None:
        lane = self._lane(index)
        execution = self._running.get(index)
        message = lane.done(execution.max_record) if execution else None
        if message is None or execution is None:
            self._broken.add(index)
            return
        _, late, status, record = message
        self._starts = 0
        del self._running[index]
        with contextlib.suppress(KeyError):
            self._selector.unregister(lane.result_fd)
        self._idle[index % 2].add(index)
        if isinstance(execution, _Compiling):
            judging.read_compiled(record, execution.nonce, execution.programs)
            self._compiled(execution)
            return
        second = index % 2 == 1
        outcome = self._outcome(execution, late, status, record, second)
        if second:
            assert execution.first is not None
            self._settle(execution, judging.join(execution.first, outcome))
        elif outcome.verdict is Verdict.VALID:
            execution.first = outcome
            self._second_runs.append(execution)
        else:
            self._settle(execution, outcome)

    def _outcome(self, execution: _Execution, late: bool, status: int, record: bytes, second: bool) -> Outcome:
        code = os.waitstatus_to_exitcode(status)
        if late or code == -signal.SIGXCPU:
            return Outcome(Verdict.TIMEOUT, detail=f"still running after {self._limits.timeout_seconds:g} s")
        if code < 0:
            return Outcome(Verdict.CRASHED, detail=f"killed by {signal.Signals(-code).name}")
        if code > 0:
            return Outcome(Verdict.CRASHED, detail=f"exited with status {code}")
        return judging.read_record(record, execution.nonce, execution.run, second=second, limits=self._limits)

    def _settle(self, execution: _Execution, outcome: Outcome) -> None:
        execution.outcome = outcome
        waiting, execution.waiting = execution.waiting, []
        for index, steps in waiting:
            self._advance(execution.batch, index, steps, outcome)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        self._open.discard(batch)
        with contextlib.suppress(ValueError):
            self._batches.remove(batch)
        if not batch.future.done() and batch.future.set_running_or_notify_cancel():
            batch.future.set_exception(error)
