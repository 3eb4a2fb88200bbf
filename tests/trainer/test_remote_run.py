"""A run on this machine whose storage and sandbox are elsewhere."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "storage"))
from s3_server import ACCESS, SECRET, client, gateway

POPULORA = Path(sys.executable).with_name("populora")
TINY = Path(__file__).with_name("tiny.yaml")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with gateway(tmp_path_factory.mktemp("s3")) as endpoint:
        client(endpoint).create_bucket(Bucket="runs")
        yield {
            **os.environ,
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL_S3": endpoint,
            "OMP_NUM_THREADS": "1",
        }


@contextlib.contextmanager
def sandbox(environment):
    command = [POPULORA, "sandbox", "serve", "--listen", "127.0.0.1:0", "--timeout", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.terminate()


def populora(environment, *words):
    return subprocess.run([POPULORA, *map(str, words)], env=environment, capture_output=True, text=True, timeout=300)


def test_a_run_in_a_bucket_with_a_sandbox_service_equals_the_run_in_a_folder(environment, tmp_path):
    here = populora(environment, "run", TINY, "--output", tmp_path / "here")
    assert here.returncode == 0, here.stderr
    with sandbox(environment) as url:
        words = ["run", TINY, "--sandbox", url, "--set", "storage.uri=s3://runs/tiny"]
        first = populora(environment, *words, "--set", "training.steps=1")
        assert first.returncode == 0, first.stderr
        there = populora(environment, *words, "--leave-status", tmp_path / "status.json")
    assert there.returncode == 0, there.stderr
    assert "Continuing s3://runs/tiny after step 1 of 2" in there.stdout
    assert "Report: s3://runs/tiny/report.html" in there.stdout
    found = [
        json.loads(populora(environment, "status", place, "--json").stdout)
        for place in (tmp_path / "here", "s3://runs/tiny")
    ]
    assert found[0]["digest"] == found[1]["digest"]
    assert found[1]["step"] == 2
    left = json.loads((tmp_path / "status.json").read_text())
    assert (left["phase"], left["step"], left["steps"]) == ("Completed", 2, 2)
    assert {member["name"] for member in left["members"]} == {member["name"] for member in found[1]["members"]}
    report = populora(environment, "report", "s3://runs/tiny", "-o", tmp_path / "page.html")
    assert report.returncode == 0, report.stderr
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_a_folder_for_a_run_that_lives_in_a_bucket_is_refused(environment, tmp_path):
    words = ["run", TINY, "--output", tmp_path, "--set", "storage.uri=s3://runs/other"]
    refused = populora(environment, *words)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"Error: --output {tmp_path}: this run goes to spec.storage.uri s3://runs/other")


def test_a_bucket_that_is_not_there_is_a_sentence(environment):
    run = ["run", TINY, "--set", "storage.uri=s3://nowhere/x"]
    for words in (["status", "s3://nowhere/x"], ["report", "s3://nowhere/x"], run):
        found = populora(environment, *words)
        assert found.returncode == 1
        assert found.stderr.splitlines()[-1] == "Error: the bucket nowhere does not exist at this endpoint"
