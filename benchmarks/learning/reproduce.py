"""Does it learn? The population, the Absolute Zero baseline and two controls on the embedded base, over seeds.

    make reproduce            writes docs/results.md and docs/results.svg; two runs at a time, a thread each

Every condition has the same compute per adapter: the same proposals, rollouts and updates a step. Runs that are
already in --runs are continued, not repeated.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POPULORA = Path(sys.executable).with_name("populora")


@dataclass(frozen=True)
class Condition:
    """One row of the comparison: a manifest and what differs from it."""

    name: str
    title: str
    manifest: str
    overrides: tuple[str, ...] = ()


CONDITIONS = (
    Condition("population", "Population, 4T + 4S", "nano-4x4.yaml"),
    Condition("single", "Single agent (Absolute Zero)", "nano-single-agent.yaml", ("training.whitening=Member",)),
    Condition("single-role", "Single agent, whitened per role", "nano-single-agent.yaml", ("training.whitening=Role",)),
    Condition("frozen", "Population, teachers frozen", "nano-4x4.yaml", ("training.freezeTeachers=true",)),
)


# Curves need evaluations on the way; the under-elicited base shows more within the time that there is.
COMMON = (
    "baseModel.uri=builtin://nano-raw",
    "evaluation.heldOut.problems=100",
    "evaluation.heldOut.everySteps=10",
    "training.keepCheckpoints=1",
)


def train(condition: Condition, seed: int, steps: int, folder: Path) -> float:
    """Train one run in a process of its own, on one thread; returns its seconds."""
    overrides = (f"population.seed={seed}", f"training.steps={steps}", *condition.overrides, *COMMON)
    command = [str(POPULORA), "run", str(ROOT / "manifests" / condition.manifest), "--output", str(folder)]
    command += [word for override in overrides for word in ("--set", override)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    start = time.monotonic()
    with folder.with_suffix(".log").open("ab") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    return time.monotonic() - start


def main() -> None:
    """Train what is missing, measure the difficulty of what teachers proposed, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "reproduce")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)

    jobs = [(condition, seed) for seed in range(options.seeds) for condition in CONDITIONS]
    started = time.monotonic()

    def job(pair: tuple[Condition, int]) -> None:
        condition, seed = pair
        seconds = train(condition, seed, options.steps, options.runs / f"{condition.name}-s{seed}")
        passed = (time.monotonic() - started) / 60
        print(f"[{passed:5.1f} min] {condition.title}, seed {seed}: {seconds:.0f} s", flush=True)

    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(job, jobs))

    from difficulty import reference_solve_rates
    from results import Outcome, write_results

    outcomes = []
    for condition, seed in jobs:
        folder = options.runs / f"{condition.name}-s{seed}"
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        first, last = asyncio.run(reference_solve_rates(folder))
        outcomes.append(Outcome(condition.name, condition.title, seed, metrics, first, last))
    minutes = (time.monotonic() - started) / 60
    print(f"Wrote {write_results(outcomes, options.out, minutes)}")


if __name__ == "__main__":
    main()
