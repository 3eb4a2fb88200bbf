"""The runs of a comparison on disk: which are there, which are to be trained, which are something else."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conditions import CONDITIONS, MANIFESTS, Condition

from populora_api import changes, parse_manifest

POPULORA = Path(sys.executable).with_name("populora")


@dataclass(frozen=True)
class Job:
    """One run of a comparison: a condition, a seed, the steps that are wanted, and the folder it lives in."""

    condition: Condition
    seed: int
    steps: int
    folder: Path

    @property
    def title(self) -> str:
        """How it is called in sentences."""
        return f"{self.condition.title}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """What its process printed."""
        return self.folder.with_suffix(".log")

    def step(self) -> int:
        """Return the newest step that is durable; 0 where nothing is."""
        pointer = self.folder / "LATEST"
        return int(json.loads(pointer.read_text())["step"]) if pointer.exists() else 0

    def complete(self) -> bool:
        """Whether the run has all its steps."""
        return self.step() == self.steps

    def strange(self) -> str:
        """Say in which fields the run in the folder is not this one; empty where it is, or where none is there."""
        stored = self.folder / "run.yaml"
        if not stored.exists():
            return ""
        wanted = self.condition.load(self.seed, self.steps, self.folder)
        found = changes(parse_manifest(stored.read_bytes(), str(stored)), wanted, local=True)
        reasons = [str(change) for change in found if change.field != "spec.training.steps"]
        if self.step() > self.steps:
            reasons.append(f"it has {self.step()} steps, and {self.steps} are wanted")
        return "; ".join(reasons)

    def train(self) -> None:
        """Train the run from where it stands, in a process of its own, on one thread.

        Raises:
            subprocess.CalledProcessError: it failed; what it printed stands in `log`.
        """
        command = [str(POPULORA), "run", str(MANIFESTS / self.condition.manifest), "--output", str(self.folder)]
        command += [word for one in self.condition.settings(self.seed, self.steps) for word in ("--set", one)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def jobs_of(folder: Path, names: Sequence[str], seeds: int, steps: int) -> list[Job]:
    """Return the runs of the named conditions, seed by seed."""
    chosen = [condition for condition in CONDITIONS if condition.name in names]
    return [Job(one, seed, steps, folder / f"{one.name}-s{seed}") for seed in range(seeds) for one in chosen]


def in_words(jobs: Sequence[Job]) -> list[str]:
    """Say which runs are not complete, one a line."""
    return [f"{job.title}: {job.step()} of {job.steps} steps ({job.folder})" for job in jobs if not job.complete()]
