"""A training step of 4 teachers and 4 students beside a single agent's, with equal proposals and rollouts per adapter.

    python benchmarks/step.py [--steps N] [--json]

Aim: under 4 times, as the population's four matchups hold four times the single agent's work.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path

from populora_api import load_manifest
from populora_trainer.session import Events, open_session

MANIFESTS = Path(__file__).resolve().parents[1] / "manifests"


def seconds_per_step(manifest: str, steps: int, folder: Path) -> list[dict[str, float]]:
    """Train and return the seconds of every step but the first, per phase and in total."""
    overrides = (f"training.steps={steps + 1}", "evaluation.heldOut.problems=0")
    run = load_manifest(MANIFESTS / manifest, overrides, output=folder)
    seconds: list[dict[str, float]] = []
    with open_session(run, events=Events(on_step=lambda metrics: seconds.append(metrics["seconds"]))) as session:
        asyncio.run(session.train())
    return seconds[1:]


def main() -> None:
    """Measure both in this process and print the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    medians: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, manifest in (("4T+4S", "nano-4x4.yaml"), ("single agent", "nano-single-agent.yaml")):
            seconds = seconds_per_step(manifest, options.steps, Path(folder) / manifest)
            phases = sorted({phase for one in seconds for phase in one})
            medians[name] = {phase: statistics.median(one.get(phase, 0.0) for one in seconds) for phase in phases}
    ratio = medians["4T+4S"]["total"] / medians["single agent"]["total"]
    if options.json:
        print(json.dumps({"load": load, "seconds": medians, "ratio": ratio}))
        return
    phases = ("propose", "solve", "evaluate", "update", "total")
    print(f"Median seconds of {options.steps} steps; load average at the start {load:.1f}")
    print(f"{'':14}" + "".join(f"{phase:>10}" for phase in phases))
    for name, row in medians.items():
        print(f"{name:14}" + "".join(f"{row[phase]:>10.2f}" for phase in phases))
    print(f"4T+4S over single agent: {ratio:.2f} (aim: under 4)")


if __name__ == "__main__":
    main()
