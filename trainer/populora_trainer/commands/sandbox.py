"""`populora sandbox`: the verifier by itself."""

import asyncio
import concurrent.futures
import json
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO

import click

from populora_trainer.diagnostics.endpoint import parse_listen
from populora_trainer.errors import PopuloraError
from populora_trainer.parameters import Seconds
from populora_trainer.sandbox import Case, Judgement, SandboxPool
from populora_trainer.sandbox.kernel import REQUIRED_LAYERS
from populora_trainer.sandbox.wire import WireError, case_from_json

_IN_FLIGHT_PER_WORKER = 16


class CaseError(PopuloraError):
    """A line is not a case."""


@dataclass(frozen=True, slots=True)
class _Line:
    case: Case
    task: "asyncio.Task[list[Judgement]]"


@click.group("sandbox")
def command() -> None:
    """Execute untrusted programs under the verifier's isolation."""


@command.command("check")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@click.option("--timeout", default=10.0, show_default=True, type=Seconds(0, 3600, min_open=True), metavar="SECONDS",
              help="Processor time of one run, and a third of its wall time; a problem takes two or more.")  # fmt: skip
@click.option("--memory", default=512, show_default=True, type=click.IntRange(16, 1 << 20), metavar="MIB",
              help="Memory of one run.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 1024), help="Programs that run at a time.  [default: processors]")
@click.option("--allow-missing", multiple=True, type=click.Choice(REQUIRED_LAYERS),
              help="Go on without this isolation layer; may be repeated.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, (1 << 64) - 1),
              help="population.seed of the run whose verdicts these are to be.")  # fmt: skip
def check(
    file: TextIO, timeout: float, memory: int, workers: int | None, allow_missing: tuple[str, ...], seed: int
) -> None:
    """Judge the cases of FILE (- for standard input), one JSON object a line, and print one JSON line a case.

    \b
    in:  {"id", "task": "code_i|code_o|code_f", "program", "input" or "inputs", "answer"?, "outputs"?}
    out: {"id", "verdict", "class", "output"? or "outputs"?, "detail"}

    Without an answer the case is a problem to validate: class is valid or invalid. With one it is correct, wrong or
    malformed (or invalid, if the problem itself is at fault). The answer of code_o is the output, of code_i an
    argument list, of code_f a program that is judged on all inputs of its case (a run gives those that the student did
    not see). Outputs, one for each input, are taken for the program's, which is not run for them. Results come in
    order, each as soon as it and all before it are known.
    """
    with SandboxPool(
        workers=workers, timeout_seconds=timeout, memory_mib=memory, allow_missing=allow_missing, seed=seed
    ) as pool:
        asyncio.run(_check(pool, _cases(file, file.name)))


@command.command("serve")
@click.option("--listen", default="127.0.0.1:8080", show_default=True, metavar="HOST:PORT", help="Where to serve.")
@click.option("--timeout", default=10.0, show_default=True, type=Seconds(0, 3600, min_open=True), metavar="SECONDS",
              help="Processor time of one run, and a third of its wall time; a problem takes two or more.")  # fmt: skip
@click.option("--memory", default=512, show_default=True, type=click.IntRange(16, 1 << 20), metavar="MIB",
              help="Memory of one run.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 1024), help="Programs that run at a time.  [default: processors]")
@click.option("--queue", default=4096, show_default=True, type=click.IntRange(1), metavar="CASES",
              help="Cases that may wait; more are answered 429.")  # fmt: skip
@click.option("--drain", default=60.0, show_default=True, type=Seconds(0, 3600), metavar="SECONDS",
              help="On SIGTERM, the time to finish what was begun.")  # fmt: skip
@click.option("--allow-missing", multiple=True, type=click.Choice(REQUIRED_LAYERS),
              help="Go on without this isolation layer; may be repeated.")  # fmt: skip
def serve(
    listen: str,
    timeout: float,
    memory: int,
    workers: int | None,
    queue: int,
    drain: float,
    allow_missing: tuple[str, ...],
) -> None:
    """Judge over HTTP until SIGTERM: POST /judge, GET /healthz, /readyz and /metrics.

    Nothing authenticates who asks: serve to a network only behind a NetworkPolicy or its like.
    """
    from populora_trainer.sandbox.service import SandboxService, ServiceLimits

    # The first process of a container is not ended by a signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    host, port = parse_listen(listen)
    limits = ServiceLimits(queued_cases=queue, drain_seconds=drain)
    with SandboxPool(workers=workers, timeout_seconds=timeout, memory_mib=memory, allow_missing=allow_missing) as pool:

        async def run() -> None:
            def say(bound: "asyncio.Future[int]") -> None:
                click.echo(f"Serving http://{host or '0.0.0.0'}:{bound.result()} with {pool.workers} workers")

            started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            started.add_done_callback(say)
            await SandboxService(pool, limits).serve(host, port, started)

        asyncio.run(run())


async def _check(pool: SandboxPool, cases: Iterable[Case]) -> None:
    queue: asyncio.Queue[_Line | Exception | None] = asyncio.Queue(_IN_FLIGHT_PER_WORKER * pool.workers)
    loop = asyncio.get_running_loop()

    async def put(item: Case | Exception | None) -> None:
        await queue.put(_Line(item, asyncio.create_task(pool.judge([item]))) if isinstance(item, Case) else item)

    def send(item: Case | Exception | None) -> None:
        if not loop.is_closed():
            asyncio.run_coroutine_threadsafe(put(item), loop).result()

    def read() -> None:
        last: Exception | None = None
        try:
            try:
                for case in cases:
                    send(case)
            except (OSError, ValueError, PopuloraError) as error:
                last = error
            send(last)
        except (concurrent.futures.CancelledError, RuntimeError):
            pass  # the loop ended before the input

    # A daemon, because a read of a terminal cannot be interrupted.
    threading.Thread(target=read, name="cases", daemon=True).start()
    while line := await queue.get():
        if isinstance(line, Exception):
            raise line
        (judgement,) = await line.task
        click.echo(json.dumps(_result(line.case, judgement)))


def _result(case: Case, judgement: Judgement) -> dict[str, object]:
    result: dict[str, object] = {"id": judgement.id, "verdict": judgement.verdict, "class": judgement.kind}
    if judgement.outputs:
        if case.task == "code_f":
            result["outputs"] = judgement.outputs
        else:
            result["output"] = judgement.outputs[0]
    return result | {"detail": judgement.detail}


def _cases(lines: Iterable[str], name: str) -> Iterator[Case]:
    """Read one case per line; blank lines are skipped.

    Raises:
        CaseError: a line is not a case; names file, line and field.
    """
    numbered = enumerate(lines, start=1)
    number = 0
    while True:
        try:
            number, line = next(numbered)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            raise CaseError(f"{name}: not UTF-8 text after line {number}: {error.reason}") from None
        if line.strip():
            yield _case(line, f"{name}, line {number}")


def _case(line: str, where: str) -> Case:
    try:
        return case_from_json(json.loads(line))
    except WireError as error:
        raise CaseError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{where}: not JSON: {error}") from None
