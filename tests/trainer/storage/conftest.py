import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


class Trainer:
    """A process of its own that trains toy runs in forked children."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, **request: object) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def train(self, folder: Path, steps: int, **faults: object) -> tuple[int, dict]:
        """Return the child's exit code (-9: killed) and what it noted: the last committed step, events, error."""
        notes = folder.with_suffix(".notes")
        notes.unlink(missing_ok=True)
        answer = self.ask(folder=str(folder), steps=steps, notes=str(notes), **faults)
        known: dict = {"committed": -1}
        for line in notes.read_text().splitlines() if notes.exists() else ():
            known.update(json.loads(line))
        return answer["code"], known


@pytest.fixture(scope="session")
def trainer():
    script = Path(__file__).with_name("toy_run.py")
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Trainer(process)
        assert process.stdin is not None
        process.stdin.close()
