"""What `make reproduce` compares: one manifest a condition, and all in which it may differ from the population's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from populora_api import PopulationRun, load_manifest

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"

# Curves need evaluations on the way; the under-elicited base shows more within the time that there is.
COMMON = (
    "baseModel.uri=builtin://nano-raw",
    "evaluation.heldOut.problems=100",
    "evaluation.heldOut.everySteps=10",
    "training.keepCheckpoints=1",
)

_ALONE = {
    "mode": "one adapter proposes and solves",
    "population.teachers": "the one member is both",
    "population.students": "the one member is both",
}
_ROLES = "Role is what Member is in the population, where an adapter has one role"


@dataclass(frozen=True)
class Condition:
    """One row of the comparison.

    Attributes:
        name: of its runs' folders.
        title: in the results.
        manifest: file in manifests/.
        differs: the fields of spec that are not as in the first condition, each with the reason; all others are equal,
            above all the rewards and what each adapter is given a step.
        overrides: of the manifest.
    """

    name: str
    title: str
    manifest: str
    differs: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    def load(self, seed: int, steps: int, folder: Path) -> PopulationRun:
        """Return the run of a seed, stored in a folder."""
        return load_manifest(MANIFESTS / self.manifest, self.settings(seed, steps), output=folder)

    def settings(self, seed: int, steps: int) -> tuple[str, ...]:
        """Return what a run of this condition sets beside its manifest."""
        return (f"population.seed={seed}", f"training.steps={steps}", *self.overrides, *COMMON)


POPULATION = Condition("population", "Population, 4T + 4S", "nano-4x4.yaml")
CONDITIONS = (
    POPULATION,
    Condition(
        "single",
        "Single agent",
        "nano-single-agent.yaml",
        {**_ALONE, "training.whitening": _ROLES},
    ),
    Condition(
        "single-pooled",
        "Single agent, whitened over both roles",
        "nano-single-agent.yaml",
        _ALONE,
        ("training.whitening=Member",),
    ),
    Condition(
        "absolute-zero",
        "Absolute Zero's recipe",
        "nano-absolute-zero.yaml",
        {
            **_ALONE,
            "training.whitening": "Absolute Zero whitens each pair of task and role",
            "rewards.preset": "Absolute Zero's own rewards, in this arm alone",
            "tasks.seedProblems": "Absolute Zero's start",
        },
    ),
    Condition(
        "frozen",
        "Population, teachers frozen",
        "nano-4x4.yaml",
        {"training.freezeTeachers": "a control: teachers propose and do not learn"},
        ("training.freezeTeachers=true",),
    ),
)
