"""A toy training run whose every step follows from the step before, so that a wrong resume shows in LATEST.

As a program it is a server: for each line of JSON on standard input it forks a child that trains, and answers with how
the child ended.
"""

import json
import os
import random
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from populora_trainer.errors import StorageError
from populora_trainer.population.factors import Pair
from populora_trainer.population.members import founders
from populora_trainer.population.peft_format import AdapterConfig
from populora_trainer.randomness import draw, tensor_generator
from populora_trainer.storage.checkpoint import Adapter, CheckpointState
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.run import Run
from populora_trainer.storage.s3 import S3Store
from populora_trainer.storage.store import ObjectStore

sys.path.insert(0, str(Path(__file__).parent))
from faults import die, faults

CONFIG = AdapterConfig(rank=2, alpha=4.0, target_modules=("q_proj",), base_model="builtin://nano")
# A kill at a flush leaves what a kill at the next of these leaves.
BOUNDARIES = ("open", "write", "ftruncate", "link", "replace", "unlink")
MANIFEST = "kind: PopulationRun\n"


def first_state() -> CheckpointState:
    adapters = [Adapter({"layers.0.q_proj": Pair(torch.ones(2, 3), torch.zeros(4, 2))}, CONFIG) for _ in range(2)]
    optimizer = {"A.exp_avg": torch.zeros(2, 2, 3), "steps": torch.zeros(2, dtype=torch.int64)}
    return CheckpointState(founders(1, 1), adapters, optimizer, b"problems", b"cells", {"generation": 0, "seen": 0})


def next_state(state: CheckpointState, step: int) -> CheckpointState:
    """One step of training: everything changes by a named draw, on top of what was there."""
    noise = torch.randn(2, 3, generator=tensor_generator(0, step, "toy"))
    adapters = [
        Adapter({path: Pair(A + (slot + 1) * noise, B + A.sum()) for path, (A, B) in adapter.factors.items()}, CONFIG)
        for slot, adapter in enumerate(state.adapters)
    ]
    optimizer = {
        "A.exp_avg": 0.9 * state.optimizer["A.exp_avg"] + noise,
        "steps": state.optimizer["steps"] + 1,
    }
    # The archive changes every second step only: the next checkpoint then names the same object again.
    archive = state.archive + (b"+" if step % 2 else b"")
    members = tuple(replace(one, mu=one.mu + draw(0, step, one.name) % 100 / 7, games=step) for one in state.members)
    counters = {"generation": step // 2, "seen": draw(0, step, "seen") % 1000}
    return CheckpointState(members, adapters, optimizer, state.buffer + bytes([step]), archive, counters)


def train(folder: Path, steps: int, *, keep: int | None = 1, from_step: int | None = None, committed=lambda step: None):
    """Train up to a number of steps, from wherever the folder's run stands."""
    train_in(LocalStore(folder), steps, keep=keep, from_step=from_step, committed=committed)


def train_in(
    store: ObjectStore, steps: int, *, keep: int | None = 1, from_step: int | None = None, committed=lambda step: None
):
    """Do the same in any store."""
    with Run.open_or_create(store, MANIFEST, from_step=from_step) as run:
        newest = run.latest()
        if newest is None:
            state, step = first_state(), 0
            run.log("metrics", {"step": 0, "seconds": time.time()})
            run.commit(0, state, keep=keep)
            committed(0)
        else:
            step, state = newest[0].step, newest[1]
        while step < steps:
            step += 1
            state = next_state(state, step)
            run.log("metrics", {"step": step, "seconds": time.time()})
            for number in range(3):
                run.log("problems", {"step": step, "number": number, "program": "x" * 50})
            run.commit(step, state, keep=keep)
            committed(step)


def child(request: dict) -> None:
    """Train in the forked child; what it has to say goes to a file, as it may die at any moment."""
    notes = Path(request["notes"])

    def note(**fact: object) -> None:
        with open(notes, "a") as file:
            file.write(json.dumps(fact) + "\n")

    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if "file_limit" in request:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], hard_limit))
    try:
        if "bucket" in request:
            note(pid=os.getpid())
            os.environ.update(request["environment"])
            store = S3Store(request["bucket"], request["prefix"], endpoint=request["endpoint"])
            train_in(store, request["steps"], committed=lambda step: note(committed=step))
            os._exit(0)
        with faults(request.get("kill_at"), die, BOUNDARIES) as recorder:
            folder = Path(request["folder"])
            train(folder, request["steps"], committed=lambda step: note(committed=step))
        note(events=len(recorder.events))
    except StorageError as error:
        if "file_limit" in request:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
        note(error=str(error))
        os._exit(1)
    os._exit(0)


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "hold" in request:
            with LocalStore(request["hold"]).lock():
                print(json.dumps({"pid": os.getpid()}), flush=True)
                sys.stdin.readline()
            print(json.dumps({"released": True}), flush=True)
            continue
        process = os.fork()
        if not process:
            random.seed(0)
            child(request)
        _, status = os.waitpid(process, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
