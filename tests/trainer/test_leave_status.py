import io
import json

from rich.console import Console

from populora_trainer.diagnostics.prometheus import RunMonitor
from populora_trainer.progress import _leave


def status(members):
    one = {"role": "teacher", "generation": 0, "mu": 25.0, "sigma": 8.333333333333334, "lcb": 0.0}
    return {**RunMonitor(3).status(), "members": [{"name": f"t{number}", **one} for number in range(members)]}


def test_the_last_status_fits_into_a_termination_message(tmp_path):
    for members, kept in ((8, 8), (128, 0)):
        _leave(Console(file=io.StringIO()), status(members), tmp_path / "log")
        text = (tmp_path / "log").read_text()
        assert len(text) <= 4096
        assert len(json.loads(text)["members"]) == kept
        assert json.loads(text)["steps"] == 3


def test_a_run_that_is_done_stays_done_where_its_status_cannot_be_left(tmp_path):
    said = io.StringIO()
    _leave(Console(file=said), status(1), tmp_path / "none" / "log")
    assert "--leave-status" in said.getvalue()
    assert "No such file or directory" in said.getvalue()
