"""Does it learn? The population, single agents and a control on the embedded base, over seeds.

    make reproduce                       trains what is missing, then writes docs/results.md and docs/results.svg
    reproduce.py --missing               says what is missing, and ends
    reproduce.py --partial               writes results of the runs that are complete, and names those that are not

Every condition has the same compute per adapter: the same proposals, rollouts and updates a step. It can be stopped
and called again at any time: a run goes on from its last step, and what is complete is not computed again. Two runs at
a time, a thread each.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conditions import CONDITIONS
from runs import Job, in_words, jobs_of

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Train what is missing, measure the difficulty of what teachers proposed, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "reproduce", help="where the runs are kept")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--conditions", nargs="+", choices=[one.name for one in CONDITIONS], metavar="NAME")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--missing", action="store_true", help="say what is missing, and end: 1 if anything is")
    parser.add_argument("--partial", action="store_true", help="train nothing, write what there is")
    options = parser.parse_args()
    names = options.conditions or [one.name for one in CONDITIONS]
    jobs = jobs_of(options.runs, names, options.seeds, options.steps)
    strangers = [f"{job.folder} holds another run: {reason}" for job in jobs if (reason := job.strange())]
    if strangers:
        sys.exit("\n".join([*strangers, "Move them away, or name another folder with --runs."]))
    report(jobs)
    if options.missing:
        sys.exit(0 if not in_words(jobs) else 1)
    options.runs.mkdir(parents=True, exist_ok=True)
    failures = [] if options.partial else train([job for job in jobs if not job.complete()], options.workers)
    missing = in_words(jobs)
    if missing and not options.partial:
        sys.exit("\n".join(["No results are written, since these runs are missing:", *missing, *failures]))
    write([job for job in jobs if job.complete()], missing, options.out)


def report(jobs: Sequence[Job]) -> None:
    """Print what is there and what is missing."""
    missing = in_words(jobs)
    print(f"{len(jobs) - len(missing)} of {len(jobs)} runs are complete" + (":" if missing else ""), flush=True)
    for line in missing:
        print(f"  missing  {line}", flush=True)


def train(jobs: Sequence[Job], workers: int) -> list[str]:
    """Train the runs, some at a time; returns a sentence for each that failed, which stops no other."""
    started = time.monotonic()
    failures: list[str] = []

    def one(job: Job) -> None:
        try:
            job.train()
        except subprocess.CalledProcessError as error:
            failures.append(f"{job.title} ended with {error.returncode}; {job.log} says why")
        passed = (time.monotonic() - started) / 60
        print(f"[{passed:5.1f} min] {job.title}: {job.step()} of {job.steps} steps", flush=True)

    with ThreadPoolExecutor(max_workers=workers) as pool:
        futures = [pool.submit(one, job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except KeyboardInterrupt:
            # The runs that go on have got the same signal and stop after their step; no other begins.
            pool.shutdown(cancel_futures=True)
            failures.append("Stopped; the same command goes on.")
    return failures


def write(jobs: Sequence[Job], missing: Sequence[str], out: Path) -> None:
    """Write the results of complete runs."""
    if not jobs:
        sys.exit("No run is complete, so there is nothing to write.")
    from results import Outcome, write_results

    outcomes = []
    for job in jobs:
        first, last = reference(job)
        outcomes.append(Outcome(job.condition.name, job.condition.title, job.seed, job.metrics(), first, last))
    print(f"Wrote {write_results(outcomes, out, missing)}")


def reference(job: Job) -> tuple[float, float]:
    """Return the frozen base's solve rates on the run's first and last problems, measured once and kept."""
    kept, newest = job.folder.with_suffix(".reference.json"), (job.folder / "LATEST").read_text()
    if kept.exists():
        known = json.loads(kept.read_text())
        if known["newest"] == newest:
            return known["first"], known["last"]
    from difficulty import reference_solve_rates

    first, last = asyncio.run(reference_solve_rates(job.folder))
    made = kept.with_suffix(".new")
    made.write_text(json.dumps({"newest": newest, "first": first, "last": last}))
    made.replace(kept)
    return first, last


if __name__ == "__main__":
    main()
