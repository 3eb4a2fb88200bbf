"""A base model that is not there is a wrong manifest: no cluster should try again."""

import subprocess
import sys
from pathlib import Path

POPULORA = Path(sys.executable).with_name("populora")
TINY = Path(__file__).parents[1] / "tiny.yaml"


def test_a_run_whose_base_model_is_not_there_ends_as_one_whose_manifest_is_wrong(tmp_path: Path) -> None:
    absent = f"baseModel.uri=file://{tmp_path}/absent"
    command = [POPULORA, "run", TINY, "--output", tmp_path / "run", "--set", absent]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 42
    said = f"Error: {absent.replace('=', ': ')} has no config.json; name the folder of a saved model\n"
    assert ended.stderr == said
