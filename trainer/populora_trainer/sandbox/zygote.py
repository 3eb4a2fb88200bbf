"""The warm process that programs are forked from: two a worker, started by exec, never by fork.

One makes the first run of programs, the other all further ones: it has another hash seed, and variation.py in place.

It loads every allowed module, gives up all it can (see kernel.py), then forks one child per run, kills it at the
deadline and reports how it ended. It reads neither jobs nor results: a child takes its job from a file that only the
decider writes, and writes its record to a pipe that only the decider reads, so nothing of one run is in the memory
that the next run inherits.

Protocol on the control socket: first one JSON object, `{layer: reason it is missing or null}` with a 4-byte length;
then per run GO from the decider and DONE from here, when no process of the run is left.
"""

import contextlib
import gc
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NoReturn

from populora_trainer.sandbox import kernel, program

GO = struct.Struct("=IId")  # run, bytes of the job, timeout in seconds
DONE = struct.Struct("=I?id")  # run, whether the deadline passed, wait status, seconds of processor time
LENGTH = struct.Struct("=I")
WALL_FACTOR = 3

_CHILD_ENDED = (int(signal.SIGCHLD),)
_wait_for_signal = getattr(signal, "sigtimedwait", None)  # not everywhere


def _coarse_clock() -> None:
    if time.clock_gettime(_COARSE) == 0:
        raise OSError("it stands still")


_COARSE = getattr(time, "CLOCK_REALTIME_COARSE", 5)
_OF_A_PROCESS: dict[str, Callable[[], object]] = {
    "start a process": os.fork,
    "open a file": lambda: os.open("/", os.O_RDONLY),
    "signal its parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "open a pipe": os.pipe,
    "change its limits": lambda: kernel.limit_program(60),
}
_OF_THE_CLOCK: dict[str, Callable[[], object]] = {
    "read the time": time.time,
    "read a timer": time.monotonic,
    "read a coarse clock": _coarse_clock,
}


class Isolation:
    """The layers of one zygote: entered once, completed by every child."""

    def __init__(self, memory_mib: int) -> None:
        self.missing: dict[str, str | None] = {}
        self._kernel: kernel.Kernel | None = None
        self._confinement: kernel.Confinement | None = None
        self._children: int | None = None
        try:
            self._kernel = kernel.Kernel()
        except (OSError, AttributeError) as error:
            self.missing = dict.fromkeys((*kernel.REQUIRED_LAYERS, *kernel.OPTIONAL_LAYERS), str(error))
        else:
            self._enter(self._kernel, memory_mib)

    def _enter(self, system: kernel.Kernel, memory_mib: int) -> None:
        missing = self.missing
        with contextlib.suppress(OSError):  # opened while files can be; needed where programs can start processes
            self._children = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
        missing["clock"] = kernel.attempt(system.hide_clock)
        missing["namespaces"] = kernel.attempt(system.namespaces)
        missing["unprivileged"] = kernel.attempt(kernel.drop_root)
        missing["rlimits"] = kernel.attempt(lambda: kernel.limit_worker(memory_mib))
        missing["nnp"] = kernel.attempt(system.no_new_privileges)
        missing["landlock"] = kernel.attempt(system.landlock)
        system.die_with_parent()  # after the change of user, which resets it
        system.adopt_orphans()
        missing["seccomp"] = kernel.attempt(lambda: system.install(system.supervisor_filter()))
        self._confinement = kernel.Confinement(
            limits=missing["rlimits"] is None,
            program=system.program_filter() if missing["seccomp"] is None else None,
        )

    @property
    def confines_processes(self) -> bool:
        """Whether a program cannot start a process, so that its process tree is one process."""
        return self._kernel is not None and self.missing["seccomp"] is None

    def kill_strays(self) -> None:
        """Kill what a program left behind where it can start processes: orphans are children of this one by now."""
        if self._children is None:
            return
        while children := os.pread(self._children, 1 << 16, 0).split():
            for pid in children:
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(-1, 0)

    def complete(self, cpu_seconds: int) -> None:
        """Take from this child what the zygote still needs."""
        if self._children is not None:
            os.close(self._children)
        if self._confinement is not None:
            self._confinement.apply(cpu_seconds)

    def settle(self) -> bool:
        """Return whether programs cannot start processes; let go of what nobody needs then."""
        if self.confines_processes and self._children is not None:
            os.close(self._children)
            self._children = None
        return self.confines_processes


def main(control: int, job_fd: int, result_fd: int, memory_mib: int, varied: bool) -> NoReturn:
    """Serve runs until the decider closes the control socket."""
    module, unvaried = program.prepare(varied)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    # More for further runs, so that who counts what memory there is finds another number.
    isolation = Isolation(memory_mib + memory_mib // 2 if varied else memory_mib)
    isolation.missing["variation"] = unvaried
    if isolation.confines_processes:
        isolation.missing["clock"] = isolation.missing["clock"] or _probe(isolation, _OF_THE_CLOCK)
        isolation.missing["seccomp"] = _probe(isolation, _OF_A_PROCESS)
    confined = isolation.settle()
    report = json.dumps(isolation.missing).encode()
    gc.collect()
    gc.freeze()  # a child's collector then leaves the shared pages alone
    os.write(control, LENGTH.pack(len(report)) + report)
    while True:
        order = os.read(control, GO.size)
        if len(order) != GO.size:
            os._exit(0)
        run, size, timeout = GO.unpack(order)
        pid = os.fork()
        if pid == 0:
            _child(isolation, module, control, job_fd, result_fd, size, timeout)
        timed_out, status, seconds = _await(pid, timeout)
        if not confined:
            isolation.kill_strays()
        os.write(control, DONE.pack(run, timed_out, status, seconds))


def _child(
    isolation: Isolation, module: ModuleType, control: int, job_fd: int, result_fd: int, size: int, timeout: float
) -> NoReturn:
    try:
        job = os.pread(job_fd, size, 0)
        os.close(control)
        os.close(job_fd)
        isolation.complete(int(timeout) + 2)
        program.run(job, module, result_fd)
    finally:  # never back into the zygote's loop, whatever the program did to its own interpreter
        os._exit(1)


def _await(pid: int, timeout: float) -> tuple[bool, int, float]:
    """Wait for the child and kill it when its time is up; return whether it was, its wait status and its time.

    Its time is `timeout` seconds of processor time, so that verdicts do not depend on what else the machine does, and
    at most WALL_FACTOR times that by the clock on the wall.
    """
    late = False
    waited = 0.0
    if _wait_for_signal is not None:
        # Nearly every run ends here. What this process touches after a fork has to be copied, so it touches little.
        if _wait_for_signal(_CHILD_ENDED, timeout) is None:
            waited = timeout
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return late, status, usage.ru_utime + usage.ru_stime
    started = time.monotonic() - waited
    last, check = started + WALL_FACTOR * timeout, started + timeout
    while True:
        ended, status, usage = os.wait4(pid, 0 if late else os.WNOHANG)
        if ended:
            return late, status, usage.ru_utime + usage.ru_stime
        now = time.monotonic()
        if now >= check:
            left = timeout - _processor_seconds(pid)
            late = left <= 0 or now >= last
            check = min(now + max(left, 0.001), last)
        if late:
            os.kill(pid, signal.SIGKILL)
        elif _wait_for_signal is not None:
            _wait_for_signal(_CHILD_ENDED, check - now)
        else:
            time.sleep(0.001)


def _processor_seconds(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock that clock_getcpuclockid(3) names
    except OSError:
        return float("inf")


def _probe(isolation: Isolation, attempts: Mapping[str, Callable[[], object]]) -> str | None:
    """Try in a completed child what no program may do; return what was not refused."""
    pid = os.fork()
    if pid == 0:
        try:
            isolation.complete(60)
        except BaseException:
            os._exit(100)
        for index, act in enumerate(attempts.values(), start=1):
            with contextlib.suppress(OSError, ValueError):
                act()
                os._exit(index)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return None
    return f"a program could {list(attempts)[code - 1]}" if 0 < code < 100 else "a child could not be confined"


def start() -> NoReturn:
    """Entry point of the process; the arguments are those of `main`."""
    control, job_fd, result_fd, memory_mib, varied = map(int, sys.argv[1:])
    try:
        main(control, job_fd, result_fd, memory_mib, bool(varied))
    except BaseException as error:
        report = json.dumps({"start": f"{type(error).__name__}: {error}"}).encode()
        os.write(control, LENGTH.pack(len(report)) + report)
        os._exit(1)
