"""What people type by mistake or a script by accident: one sentence, and nothing replaced."""

import json
import os
import stat

import pytest
from click.testing import CliRunner

from populora_trainer.commands.report import command as report
from populora_trainer.commands.sandbox import command as sandbox
from populora_trainer.commands.status import command as status
from populora_trainer.errors import PopuloraError, StorageError

RUN = "apiVersion: populora.dev/v1alpha1\nkind: PopulationRun\nmetadata: {name: '%s'}\nspec: {}\n"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "m[/]n"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(RUN % "a[/red]b")
    (folder / "metrics.jsonl").write_text("")
    return folder


def test_a_report_replaces_no_device_pipe_or_folder_and_follows_a_link(run, tmp_path):
    pipe, page, link = tmp_path / "pipe", tmp_path / "page.html", tmp_path / "link.html"
    os.mkfifo(pipe)
    for target in (pipe, tmp_path):
        result = CliRunner().invoke(report, [str(run), "-o", str(target)])
        assert result.exit_code != 0
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    page.write_text("old")
    link.symlink_to(page)
    assert CliRunner().invoke(report, [str(run), "-o", str(link)]).exit_code == 0
    assert link.is_symlink()
    assert page.read_text() != "old"


def test_names_are_shown_as_they_are(run):
    result = CliRunner().invoke(status, [str(run)], env={"COLUMNS": "500"})
    assert result.exit_code == 0, result.exception
    assert "a[/red]b in " in result.output
    assert str(run) in result.output


@pytest.mark.parametrize("text", [b"\xff\xfe", b"a: [", b"", b"[1]", b"word"])
def test_a_damaged_manifest_of_a_run_is_named(run, text):
    (run / "run.yaml").write_bytes(text)
    result = CliRunner().invoke(status, [str(run)])
    assert isinstance(result.exception, StorageError)
    assert "run.yaml is damaged" in str(result.exception)


@pytest.mark.parametrize(
    "words",
    [
        ("check", "-", "--timeout", "nan"),
        ("check", "-", "--timeout", "inf"),
        ("check", "-", "--timeout", "1e300"),
        ("check", "-", "--workers", "100000000"),
        ("check", "-", "--memory", "999999999999999999"),
        ("serve", "--drain", "nan"),
    ],
)
def test_limits_that_are_none_are_refused(words):
    result = CliRunner().invoke(sandbox, words, input="")
    assert result.exit_code == 2
    assert words[-2] in result.output


def test_a_place_that_cannot_be_written_is_a_sentence(run):
    result = CliRunner().invoke(report, [str(run), "-o", "/nonexistent/page.html"])
    assert isinstance(result.exception, PopuloraError)


def test_status_takes_the_newest_step_of_a_log_in_any_order(run):
    lines = [
        {"step": 3, "solve_rate": {"overall": 0.3}, "held_out": {"solve_rate": {"overall": 0.31}}},
        {"step": 7, "solve_rate": {"overall": 0.7}, "held_out": {"solve_rate": {"overall": 0.71}}},
        {"step": 5, "solve_rate": {"overall": 0.5}, "held_out": {"solve_rate": {"overall": 0.51}}},
        {"step": None, "solve_rate": {"overall": 0.1}},
        {"step": True, "solve_rate": {"overall": 0.1}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": NaN}\n{"step": 1' + "0" * 400 + "}\n"
    (run / "metrics.jsonl").write_text(text)
    result = CliRunner().invoke(status, [str(run), "--json"])
    found = json.loads(result.output)
    assert (found["metrics_step"], found["solve_rate"]["overall"]) == (7, 0.7)
    assert (found["held_out_step"], found["held_out"]) == (7, 0.71)
