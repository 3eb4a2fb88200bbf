"""Helpers of tests are imported by a bare name from folders on sys.path, so no two may share one."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_two_helpers_have_the_same_name() -> None:
    folders = (ROOT / "tests", ROOT / "benchmarks" / "learning")
    names = Counter(path.stem for folder in folders for path in folder.rglob("*.py") if path.stem != "conftest")
    assert [name for name, count in names.items() if count > 1 and not name.startswith("test_")] == []
