import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from populora_trainer.commands.report import command
from populora_trainer.diagnostics.report import load, render
from populora_trainer.diagnostics.report_data import load_run
from populora_trainer.diagnostics.report_numbers import summarise
from populora_trainer.errors import PopuloraError

HOSTILE = "<script>alert(1)</script>"


def line(step, **changes):
    rates = {"overall": 0.5, "code_i": 0.4, "code_o": 0.6, "code_f": None}
    return {
        "step": step,
        "seconds": {"propose": 1.0, "solve": 2.0, "total": 3.0},
        "solve_rate": rates | {"overall": step / 100},
        "valid_rate": 0.9,
        "reward": {"teacher": 0.4, "student": -0.1},
        "entropy": {"teacher": 1.5, "student": 0.5},
        "response_tokens": {"teacher": 30.0, "student": 12.0},
        "complexity": {"ast_depth": 6.0, "cyclomatic": 2.0, "loc": 4.0, "variables": 2.0},
        "ratings": {
            "t0": {"mu": 25.0, "sigma": 5.0, "lcb": 10.0},
            "t1": {"mu": 27.0, "sigma": 5.0, "lcb": 12.0},
            "s0": {"mu": 25.0, "sigma": 5.0, "lcb": 10.0},
        },
        "tokens_per_second": 1000.0,
        "advantage": {"std": 1.0},
        "coverage": 0.01 * step,
    } | changes


def problem(step=1, solve_rate=0.125, program="def f(a):\n    return a", **changes):
    return {
        "step": step,
        "teacher": "t0",
        "student": "s0",
        "task": "code_f",
        "program": program,
        "inputs": ["1", "2"],
        "outputs": ["1", "2"],
        "shown": 1,
        "message": "hint",
        "verdict": "valid",
        "valid": True,
        "solve_rate": solve_rate,
        "reward": 0.5,
        "complexity": {"ast_depth": 3, "cyclomatic": 1, "loc": 2, "variables": 1},
        "seen": False,
    } | changes


def matchup(step, teacher="t0", student="s0", solve_rate=0.5, valid=8):
    return {
        "step": step,
        "teacher": teacher,
        "student": student,
        "tasks": {"code_o": {"proposals": 8, "valid": valid, "solve_rate": solve_rate}},
        "games": [],
    }


def birth(step=10, child="t0-g1", operator="X2", parents=("t1", "t0"), replaced="t0", **changes):
    return {
        "step": step,
        "event": "birth",
        "child": child,
        "generation": 1,
        "operator": operator,
        "parents": [{"name": name} for name in parents],
        "replaced": {"name": replaced},
        "diagnostics": {
            "norm": 2.0,
            "parents": [{"norm_ratio": 1.5, "cosine": 0.5}, {"norm_ratio": None, "cosine": 0.7}],
        },
    } | changes


@pytest.fixture
def write(tmp_path):
    """Write a run's files and return its folder."""

    def make(name="run", steps=20, metrics=None, problems=(), matchups=(), evolution=(), manifest=True):
        folder = tmp_path / name
        folder.mkdir()
        if manifest:
            (folder / "run.yaml").write_text(
                f"kind: PopulationRun\nmetadata: {{name: {name}}}\n"
                "spec: {mode: Population, baseModel: {uri: 'builtin://nano'}, population: {teachers: 2, seed: 7}}\n"
            )
        logs = {
            "metrics": [line(step) for step in range(1, steps + 1)] if metrics is None else metrics,
            "problems": problems,
            "matchups": matchups,
            "evolution": evolution,
        }
        for log, records in logs.items():
            (folder / f"{log}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return folder

    return make


class Page(HTMLParser):
    """What a browser would see: text by element, and every attribute that could load something."""

    def __init__(self, html):
        super().__init__()
        self.open, self.texts, self.links, self.scripts = [], [], [], 0
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.scripts += tag == "script"
        self.links += [value for name, value in attributes if name in ("src", "href", "action", "data")]

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data.strip())

    @property
    def titles(self):
        return [text for text in self.texts if text]


def page(*folders):
    return Page(render(load(folders)))


def test_the_page_shows_every_curve_that_was_measured(write):
    found = page(write()).titles
    for title in (
        *("Training solve rate, %", "Training solve rate by type, %", "Mean reward", "Valid proposals, %", "AST depth"),
        *("Cyclomatic complexity", "Lines of code", "Variables", "Archive coverage, %"),
        *("Policy entropy by role, nats a token", "Response length by role, tokens"),
        *("Tokens a second", "Seconds a step, by phase", "TrueSkill of the teachers"),
        "TrueSkill of the students",
    ):
        assert title in found
    assert "Held-out solve rate, %" not in found
    assert "Lineage" not in found


def test_evaluations_and_evolution_appear_where_there_are_any(write):
    rates = {"overall": 0.3, "code_i": 0.3, "code_o": 0.3, "code_f": 0.3}
    start = {"step": 0, "held_out": {"solve_rate": rates, "stderr": 0.02, "greedy": rates}}
    end = line(2, held_out={"solve_rate": rates | {"overall": 0.45}, "stderr": 0.02})
    folder = write(metrics=[start, line(1), end], matchups=[matchup(1), matchup(1, "t1")], evolution=[birth(2)])
    found = page(folder).titles
    for title in (
        "Held-out solve rate, %",
        "Who solves whom, %",
        "Lineage",
    ):
        assert title in found
    assert "30 % → 45 %" in found
    assert "X2" in found


def test_the_page_needs_no_network(write):
    html = render(load([write(problems=[problem()])]))
    assert all(link.startswith("#") for link in Page(html).links)
    assert set(re.findall(r"https?://[\w./]+", html)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in html
    assert "url(" not in html


def test_what_models_wrote_is_text_and_never_markup(write):
    folder = write(
        problems=[
            problem(program=f"def f(a):\n    return '{HOSTILE}'", message=HOSTILE, inputs=[HOSTILE], outputs=[HOSTILE])
        ],
        metrics=[line(1, ratings={HOSTILE: {"mu": 1.0, "sigma": 1.0, "lcb": 1.0}}, seconds={HOSTILE: 1.0})],
        matchups=[matchup(1, teacher=HOSTILE), matchup(1, teacher=HOSTILE, student=HOSTILE)],
        evolution=[birth(1, child=f"t0-g{HOSTILE}", operator=HOSTILE) | {"diagnostics": {HOSTILE: 1.0}}],
    )
    (folder / "run.yaml").write_text(f"metadata: {{name: '{HOSTILE}'}}\nspec: {{mode: '{HOSTILE}'}}\n")
    html = render(load([folder]))
    assert "alert(1)" in html
    assert HOSTILE not in html
    assert Page(html).scripts == 1


def test_the_hardest_problems_are_the_least_solved_of_the_solved(write):
    problems = [
        problem(1, 0.5, "def f(a):\n    return 1"),
        problem(2, 0.125, "def f(a):\n    return 2"),
        problem(3, 0.0, "def f(a):\n    return 3"),
        problem(4, None, "def f(a):\n    return 4", valid=False),
        problem(5, 0.875, "def f(a):\n    return 2"),
        problem(
            6, 0.125, "def f(a):\n    return 6", complexity={"ast_depth": 9, "cyclomatic": 9, "loc": 9, "variables": 9}
        ),
        problem(7, 1.0, "def f(a):\n    return 7", complexity=None),
    ]
    run = load_run(write(problems=problems))
    assert [one.step for one in run.hardest] == [6, 2, 1, 7]
    assert run.proposals == 7


def test_a_function_is_shown_with_what_its_student_saw_and_with_what_judged_it(write):
    values = ["1", "2", "3", "4", "5", "6", "7", "8", "9", "10"]
    function = problem(inputs=values, outputs=values, shown=5)
    output = problem(
        program="def f(a):\n    return 7", task="code_o", inputs=["70"], outputs=["7"], shown=0, message=""
    )
    folder = write(problems=[function, output])
    hardest = {one.task: one for one in load_run(folder).hardest}
    assert hardest["code_f"].calls == (("1", "1"), ("2", "2"), ("3", "3"))
    assert hardest["code_f"].hidden == (("6", "6"), ("7", "7"), ("8", "8"))
    assert (hardest["code_o"].calls, hardest["code_o"].hidden) == ((("70", "7"),), ())
    html = render(load([folder]))
    assert html.count("<dt>shows</dt>") == html.count("<dt>judges on</dt>") == html.count("<dt>calls</dt>") == 1


def test_problems_with_fewer_fields_are_shown_all_the_same(write):
    folder = write(problems=[{"step": 1, "solve_rate": 0.5, "program": "def f(a): return 'sparse'"}])
    assert "def f(a): return 'sparse'" in page(folder).titles


def test_many_problems_are_read_without_losing_the_hardest(write):
    problems = [problem(step, 0.5 + step % 5 / 10, f"def f(a):\n    return {step}") for step in range(1000)]
    problems.insert(500, problem(9, 0.125, "def f(a):\n    return 'hard'"))
    run = load_run(write(problems=problems))
    assert run.hardest[0].solve_rate == 0.125
    assert len(run.hardest) == 12


def test_the_matrix_is_weighted_by_valid_problems_and_joins_successors(write):
    matchups = [
        matchup(1, solve_rate=1.0, valid=2),
        matchup(2, "t0-g1", "s0-g3", 0.25, 6),
        matchup(3, "t1", "s0", None, 0),
    ]
    run = load_run(write(matchups=matchups))
    assert run.matrix == {("s0", "t0"): (3.5, 8)}


def test_a_run_that_is_still_writing_can_be_shown(write):
    folder = write(steps=3)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "solve_ra')
    assert summarise(load([folder]))[0]["steps"] == 3


@pytest.mark.parametrize("metrics", [[], [{"step": 1}], [line(1)], [{"step": 1, "ratings": None, "seconds": "x"}]])
def test_runs_of_few_or_empty_steps_can_be_shown(write, metrics):
    found = page(write(metrics=metrics)).titles
    assert ("No step has been completed yet." in found) == (not metrics)


def test_a_repeated_step_counts_once(write):
    folder = write(metrics=[line(1), line(2), line(2, valid_rate=0.5)])
    assert summarise(load([folder]))[0]["curves"]["valid_rate"]["last"] == 0.5
    assert summarise(load([folder]))[0]["curves"]["valid_rate"]["points"] == 2


def test_missing_files_are_said_and_the_rest_is_shown(write):
    folder = write(manifest=False)
    for name in ("matchups", "problems", "evolution"):
        (folder / f"{name}.jsonl").unlink()
    found = page(folder).titles
    assert "run.yaml is missing: the settings are not known." in found
    assert "matchups.jsonl is missing: there is no solve matrix." in found
    assert "Mean reward" in found


def test_a_damaged_manifest_or_lineage_is_said(write):
    folder = write(evolution=[{"event": "birth", "step": 1}])
    (folder / "run.yaml").write_text("a: [")
    notes = load_run(folder).notes
    assert notes == (
        "run.yaml cannot be read: the settings are not known.",
        "evolution.jsonl has lines that cannot be read: the lineage is not shown.",
    )


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(PopuloraError, match="missing is not a folder"):
        load([tmp_path / "missing"])
    with pytest.raises(PopuloraError, match=r"neither run\.yaml nor metrics\.jsonl"):
        load([tmp_path])


def test_runs_are_set_side_by_side(write):
    found = page(
        write("population"), write("baseline", metrics=[line(1, ratings={"a0": {"mu": 1, "sigma": 1, "lcb": -2}})])
    ).titles
    assert "population and baseline" in found
    assert "Training solve rate on code_o, %" in found
    assert "TrueSkill of the teachers · population" in found
    assert "TrueSkill of the agent · baseline" in found
    assert "Seconds a step, by phase · baseline" in found


def test_runs_of_one_name_are_told_apart_by_their_folders(write, tmp_path):
    first, second = write("a"), write("b")
    (second / "run.yaml").write_text("metadata: {name: a}\nspec: {}\n")
    assert [run.name for run in load([first, second])] == [f"a ({first})", f"a ({second})"]


def test_operators_are_judged_by_what_became_of_their_children(write):
    evolution = [
        birth(2, "t0-g1", "X2", replaced="t0"),
        birth(4, "t1-g2", "M1", parents=("t0",), replaced="t1"),
        {"event": "rank", "step": 6, "child": "t0-g1", "age": 4, "rank": 2, "of": 3},
        birth(14, "t0-g3", "X2", replaced="t0-g1"),
    ]
    rows = page(write(steps=20, evolution=evolution)).titles
    start = rows.index("X2", rows.index("First rank"))
    assert rows[start : start + 5] == ["X2", "2", "1", "100 %", "50 %"]
    assert rows[start + 5].startswith("norm 2, norm ratio 1.5, cosine 0.6")


def test_ten_thousand_steps_fit_a_page(write):
    metrics = [line(step, ratings={}) for step in range(10_000)]
    assert len(render(load([write(metrics=metrics)]))) < 1_000_000


def test_a_long_evolution_is_drawn_by_succession(write):
    rating = {"mu": 25.0, "sigma": 5.0, "lcb": 10.0}
    metrics = [line(step, ratings={f"t0-g{step}": rating, "t1": rating}) for step in range(1, 400)]
    evolution = [birth(step, f"t0-g{step}", replaced=f"t0-g{step - 1}", parents=("t1",)) for step in range(2, 400)]
    html = render(load([write(metrics=metrics, evolution=evolution)]))
    assert "A member that was replaced is followed by its child." in html
    assert "The last 240 of 398 births are shown." in html
    assert len(html) < 600_000


def run(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


def test_the_command_writes_the_page_into_the_run(write):
    folder = write()
    result = run(folder)
    assert result.output == f"Report: {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert not list(folder.glob(".report-*"))


def test_the_command_writes_where_it_is_told(write, tmp_path):
    output = tmp_path / "my page.html"
    run(write("a"), write("b"), "-o", output)
    assert "<h1>a and b</h1>" in output.read_text()


def test_several_runs_are_written_to_this_folder_by_default(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(write("a"), write("b"))
    assert Path("report.html").is_file()


def test_a_page_that_cannot_be_written_is_one_sentence(write, tmp_path):
    with pytest.raises(PopuloraError, match=r"cannot be written to .*missing/page\.html: No such file"):
        run(write(), "-o", tmp_path / "missing" / "page.html")


def test_the_numbers_are_first_last_best_and_means(write):
    folder = write(steps=20)
    result = run(folder, "--json")
    (summary,) = json.loads(result.output)["runs"]
    assert summary["curves"]["solve_rate"] == {
        "points": 20,
        "first": 0.01,
        "last": 0.2,
        "mean": pytest.approx(0.105),
        "first_mean": pytest.approx(0.025),
        "last_mean": pytest.approx(0.185),
        "mean_steps": 4,
        "minimum": 0.01,
        "maximum": 0.2,
        "best": {"value": 0.2, "step": 20},
    }
    assert summary["curves"]["entropy.teacher"]["best"] is None
    assert [summary["curves"][f"entropy.{role}"]["last"] for role in ("teacher", "student")] == [1.5, 0.5]
    assert [summary["curves"][f"response_tokens.{role}"]["last"] for role in ("teacher", "student")] == [30, 12]
    assert "solve_rate.code_f" not in summary["curves"]
    assert (summary["steps"], summary["seconds"]) == (20, 60.0)
    assert summary["settings"] == {"Mode": "Population", "Base model": "builtin://nano", "Teachers": "2", "Seed": "7"}
    assert summary["best_members"] == {"teacher": "t1", "student": "s0"}
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "1e999", "1" + "0" * 400, "9" * 6000, "1e99", "-1e99", "true", '"x"', "[]"]
)
def test_a_number_that_nothing_measured_is_a_gap_in_the_curve(write, value):
    folder = write(steps=5)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for key in ("valid_rate", "coverage", "tokens_per_second"):
        lines[2] = re.sub(rf'"{key}": [^,}}]+', f'"{key}": {value}', lines[2])
    lines[2] = re.sub(r'"(mu|overall|teacher|student|total)": [^,}]+', rf'"\1": {value}', lines[2])
    path.write_text("\n".join(lines) + "\n")
    page = render([load_run(folder)])
    assert "nan" not in re.findall(r'points="[^"]*"|d="[^"]*"', page)
    (numbers,) = summarise([load_run(folder)])
    assert numbers["curves"]["valid_rate"]["points"] == (5 if value.endswith("1e99") else 4)


def test_damaged_lines_are_named_and_the_rest_is_drawn(write):
    folder = write(steps=4)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[1:3] = ["{broken", "[1]"]
    path.write_text("\n".join(lines) + "\n")
    with (folder / "problems.jsonl").open("a") as file:
        file.write("nothing\n" * 7)
    run = load_run(folder)
    assert [record["step"] for record in run.metrics] == [1, 4]
    assert "metrics.jsonl: lines 2, 3 are no JSON object, and left out." in run.notes
    assert "problems.jsonl: lines 1, 2, 3, 4, 5, ... are no JSON object, and left out." in run.notes
