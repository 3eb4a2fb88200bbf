"""`populora` in forked children of one process that has imported everything, with faults on demand.

Each line of JSON on standard input is a request, each line on standard output its answer:

    {"start": {"argv": [...], "out": FILE, ...}}   -> {"pid": ...}     faults: see `Child`
    {"wait": PID}                                  -> {"code": ...}    -9: killed

A child is what the command would be: its own session, its own signal handlers, its output in a file.
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "storage"))
from faults import die, faults
from scripted import ScriptedEngine

from populora_trainer import cli, following, progress, session  # noqa: F401 - `following`: as the next line
from populora_trainer.commands import run as _run_command  # noqa: F401 - what the command imports, once for all
from populora_trainer.diagnostics.records import StepMetrics
from populora_trainer.ranks.group import Group
from populora_trainer.session import Events

# A kill at a flush leaves what a kill at the next of these leaves.
WRITES = ("open", "write", "ftruncate", "link", "replace", "unlink")


@dataclass(frozen=True)
class Child:
    """What a child runs, and what goes wrong in it.

    Attributes:
        argv: arguments of `populora`.
        out: file of its standard output and error.
        notes: file with one JSON object a phase, `{"step", "phase"}`, and the number of its writes at the end.
        step: the step that it begins with.
        kill_at: (step, phase) at whose beginning it is killed.
        pause_at: (step, phase) at whose beginning it waits until the file `release` exists.
        kill_at_write: number of the change to the disk at which it is killed.
        file_limit: largest size of a file in bytes.
        scripted: whether rollouts are scripted, so that every step has something to learn whatever the base is worth.
        environment: variables, e.g. those by which a rank finds its place.
        kill_at_command: (name, count) of the command of rank 0 at whose receipt it is killed, counted from 1.
    """

    argv: list[str]
    out: str
    notes: str
    step: int = 1
    kill_at: tuple[int, str] | None = None
    pause_at: tuple[int, str] | None = None
    release: str = ""
    kill_at_write: int | None = None
    file_limit: int | None = None
    scripted: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    kill_at_command: tuple[str, int] | None = None

    def run(self) -> int:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        streams = os.open(self.out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, stream in ((nothing, 0), (streams, 1), (streams, 2)):
            os.dup2(descriptor, stream)
        if self.file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_limit, resource.RLIM_INFINITY))
        sys.argv = ["populora", *self.argv]
        os.environ.update(self.environment)
        if self.kill_at_command is not None:
            self.die_by_command(*self.kill_at_command)
        if self.scripted:
            session.TransformersEngine = lambda population, **_: ScriptedEngine()  # type: ignore[assignment, misc]
            # A script makes its log-probabilities up.
            session.doubt = lambda mismatch_M, members, step: None  # type: ignore[assignment]
        progress.Events = self.watched  # type: ignore[assignment, misc]
        with ExitStack() as stack:
            recorder = stack.enter_context(faults(self.kill_at_write, die, WRITES))
            try:
                cli.main()
            except SystemExit as end:
                return end.code if isinstance(end.code, int) else 0
            finally:
                self.note(writes=len(recorder.events))
        return 0

    def die_by_command(self, name: str, count: int) -> None:
        receive, left = Group.receive, count

        def received(group: Group) -> object:
            nonlocal left
            command = receive(group)
            left -= type(command).__name__ == name
            if not left:
                die(name)
            return command

        Group.receive = received  # type: ignore[method-assign]

    def watched(
        self,
        on_phase: Callable[[str], None],
        on_step: Callable[[StepMetrics], None],
        stop: Callable[[], bool],
        on_notice: Callable[[str], None],
    ) -> Events:
        """Return the events that the command asked for, with the faults in them."""
        step = self.step

        def phase(name: str) -> None:
            self.note(step=step, phase=name)
            on_phase(name)
            if [step, name] == self.kill_at:
                die(name)
            while [step, name] == self.pause_at and not Path(self.release).exists():
                time.sleep(0.02)

        def finished(metrics: StepMetrics) -> None:
            nonlocal step
            step = metrics["step"] + 1
            on_step(metrics)

        return Events(phase, finished, stop, on_notice)

    def note(self, **fact: object) -> None:
        with open(self.notes, "a") as file:
            file.write(json.dumps(fact) + "\n")


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if not pid:
            code = 70
            try:
                code = Child(**request["start"]).run()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    serve()
