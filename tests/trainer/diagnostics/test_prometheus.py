import json
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from populora_trainer.diagnostics.endpoint import Endpoint, parse_listen
from populora_trainer.diagnostics.metrics import Sample, assemble
from populora_trainer.diagnostics.prometheus import FAMILIES, RunMonitor
from populora_trainer.errors import PopuloraError
from populora_trainer.rollout.replicas import Sync


def metrics(step=3, **changes):
    problem = {"task": "code_o", "valid": True, "verdict": "valid", "solve_rate": 0.25, "complexity": None}
    arguments = {
        "seconds": {"propose": 1.0, "solve": 2.0},
        "problems": [problem],
        "samples": [Sample("student", 10, 1.0)],
        "ratings": {"teacher-0": (25.0, 5.0)},
        "advantage": {"std": 0.5},
        "coverage": 0.125,
    }
    return assemble(step, **(arguments | changes))


def member(name, role="teacher", mu=25.0, generation=0):
    return {"name": name, "role": role, "generation": generation, "mu": mu, "sigma": 5.0, "lcb": mu - 15.0}


MEMBERS = [member("teacher-0"), member("teacher-1", mu=30.0), member("student-0", "student")]


@pytest.fixture
def monitor():
    return RunMonitor(steps=10)


@pytest.fixture
def endpoint(monitor):
    with Endpoint("127.0.0.1:0").serve(monitor) as served:
        yield served


def get(endpoint, path, **headers):
    with urllib.request.urlopen(urllib.request.Request(endpoint.url + path, headers=headers), timeout=60) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def samples(endpoint):
    text, _ = get(endpoint, "/metrics")
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_what_a_step_recorded(monitor, endpoint):
    monitor.enter("Running")
    monitor.record(metrics(), MEMBERS)
    found = samples(endpoint)
    assert found["populora_step",] == 3
    assert found["populora_steps",] == 10
    assert found["populora_solve_rate", "code_o"] == 0.25
    assert found["populora_reward", "student"] == 1.0
    assert found["populora_rating_lcb", "teacher", "teacher-1"] == 15.0
    assert found["populora_phase", "Running"] == 1
    assert found["populora_phase", "Failed"] == 0
    assert found["populora_archive_coverage",] == 0.125
    assert found["populora_advantage", "std"] == 0.5


def test_roles_are_told_apart(monitor, endpoint):
    drawn = [Sample("teacher", 40, 0.5, 1.5), Sample("student", 10, 1.0, 0.25), Sample("student", 20, -0.5, 0.25)]
    monitor.record(metrics(samples=drawn), MEMBERS)
    found = samples(endpoint)
    assert found["populora_entropy_nats", "teacher"] == 1.5
    assert found["populora_entropy_nats", "student"] == 0.25
    assert found["populora_response_tokens", "teacher"] == 40
    assert found["populora_response_tokens", "student"] == 15


def test_what_was_not_measured_is_absent(monitor, endpoint):
    monitor.record(metrics(), MEMBERS)
    found = samples(endpoint)
    assert not any(name == "populora_entropy_nats" for name, *_ in found)
    assert ("populora_response_tokens", "teacher") not in found
    assert ("populora_solve_rate", "code_f") not in found
    assert ("populora_reward", "teacher") not in found


def test_every_family_is_described_and_prefixed(endpoint):
    text, _ = get(endpoint, "/metrics")
    described = {family.name: family.documentation for family in text_string_to_metric_families(text)}
    assert described == {family.name: family.help for family in FAMILIES.values()}
    assert all(name.startswith("populora_") for name in described)


def test_counters_add_up_over_steps(monitor, endpoint):
    monitor.record(metrics(1, tokens={"sampled": 10}), MEMBERS)
    monitor.record(metrics(2, tokens={"sampled": 5, "trained": 7}), MEMBERS)
    found = samples(endpoint)
    assert found["populora_steps_completed_total",] == 2
    assert found["populora_tokens_total", "sampled"] == 15
    assert found["populora_tokens_total", "trained"] == 7
    assert found["populora_phase_seconds_total", "solve"] == 4.0
    assert found["populora_proposals_total", "valid"] == 2
    assert ("populora_phase_seconds_total", "total") not in found


def test_replaced_members_leave_no_series_behind(monitor, endpoint):
    monitor.record(metrics(1), MEMBERS)
    monitor.record(metrics(2), [*MEMBERS[1:], member("teacher-0-g1", generation=1)])
    found = samples(endpoint)
    assert ("populora_rating_mu", "teacher", "teacher-0") not in found
    assert found["populora_member_generation", "teacher", "teacher-0-g1"] == 1


def test_a_held_out_evaluation_stays_until_the_next(monitor, endpoint):
    rates = {"overall": 0.5, "code_i": None, "code_o": 0.5, "code_f": None}
    monitor.record(metrics(1, held_out={"solve_rate": rates}), MEMBERS)
    monitor.record(metrics(2), MEMBERS)
    found = samples(endpoint)
    assert found["populora_held_out_solve_rate", "overall"] == 0.5
    assert ("populora_held_out_solve_rate", "code_i") not in found


def test_a_restored_run_shows_its_step_and_counts_nothing(monitor, endpoint):
    monitor.restore(metrics(7), MEMBERS)
    found = samples(endpoint)
    assert found["populora_step",] == 7
    assert found["populora_steps_completed_total",] == 0


def test_openmetrics_is_spoken_on_request(monitor, endpoint):
    monitor.record(metrics(), MEMBERS)
    text, content_type = get(endpoint, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert "populora_tokens" in {family.name for family in parse_openmetrics(text)}


def test_status_says_where_the_run_is(monitor, endpoint):
    monitor.enter("Running")
    monitor.record(metrics(4), MEMBERS)
    text, content_type = get(endpoint, "/status")
    status = json.loads(text)
    assert content_type == "application/json"
    assert (status["phase"], status["step"], status["steps"], status["progressPercent"]) == ("Running", 4, 10, 40.0)
    assert status["estimatedSecondsRemaining"] == 6 * 3.0
    assert status["best"] == {"teacher": "teacher-1", "student": "student-0"}
    assert status["members"] == MEMBERS
    assert (status["solveRate"], status["coverage"]) == (0.25, 0.125)


def test_status_of_a_run_that_has_not_begun(endpoint):
    status = json.loads(get(endpoint, "/status")[0])
    assert (status["phase"], status["step"], status["progressPercent"]) == ("Pending", 0, 0.0)
    assert status["estimatedSecondsRemaining"] is None
    assert status["best"] == {"teacher": None, "student": None}


def test_a_single_agent_is_the_best_of_both_roles(monitor):
    monitor.record(metrics(), [member("agent", "agent")])
    assert monitor.status()["best"] == {"teacher": "agent", "student": "agent"}


def test_health_and_unknown_paths(endpoint):
    assert get(endpoint, "/healthz")[0] == "ok\n"
    with pytest.raises(urllib.error.HTTPError) as missing:
        get(endpoint, "/etc/passwd")
    assert missing.value.code == 404
    head = urllib.request.Request(endpoint.url + "/healthz", method="HEAD")
    with urllib.request.urlopen(head, timeout=60) as answer:
        assert answer.read() == b""


def test_readers_and_the_loop_do_not_disturb_each_other(monitor, endpoint):
    monitor.record(metrics(1), MEMBERS)
    failures = []

    def read():
        try:
            for _ in range(20):
                assert samples(endpoint)["populora_steps",] == 10
        except Exception as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for step in range(2, 60):
        monitor.record(metrics(step), MEMBERS)
    for reader in readers:
        reader.join()
    assert not failures


def test_two_runs_in_one_process_do_not_share_metrics():
    one, other = RunMonitor(1), RunMonitor(2)
    with Endpoint("127.0.0.1:0").serve(one) as first, Endpoint("127.0.0.1:0").serve(other) as second:
        assert first.port != second.port
        assert samples(first)["populora_steps",] == 1
        assert samples(second)["populora_steps",] == 2


def test_closing_frees_the_port(monitor):
    with Endpoint("127.0.0.1:0").serve(monitor) as first:
        port = first.port
    with Endpoint(f"127.0.0.1:{port}").serve(monitor) as second:
        assert get(second, "/healthz")[0] == "ok\n"


def test_a_taken_port_is_one_clear_sentence(monitor, endpoint):
    with pytest.raises(PopuloraError, match=rf"--listen 127.0.0.1:{endpoint.port}: .*[Aa]ddress"):
        Endpoint(f"127.0.0.1:{endpoint.port}").serve(monitor)


@pytest.mark.parametrize("listen", ["9090", "localhost:", "localhost:http", "localhost:70000", "::1:9090", ""])
def test_a_malformed_address_is_refused(listen):
    with pytest.raises(PopuloraError, match="--listen"):
        parse_listen(listen)


@pytest.mark.parametrize(
    ("listen", "parsed"),
    [("127.0.0.1:9090", ("127.0.0.1", 9090)), ("[::1]:0", ("::1", 0)), (":80", ("", 80)), ("node-1:1", ("node-1", 1))],
)
def test_addresses_are_split_at_their_last_colon(listen, parsed):
    assert parse_listen(listen) == parsed


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_ipv6_is_served_or_refused_with_a_sentence(monitor):
    if _has_ipv6():
        with Endpoint("[::1]:0").serve(monitor) as served:
            assert served.url.startswith("http://[::1]:")
            assert get(served, "/healthz")[0] == "ok\n"
    else:
        with pytest.raises(PopuloraError, match=r"--listen \[::1\]:0"):
            Endpoint("[::1]:0").serve(monitor)


def test_how_far_vllm_is_is_shown_while_the_trainer_waits_and_after(monitor, endpoint):
    assert "serving" not in json.loads(get(endpoint, "/status")[0])
    assert not any(name.startswith(("populora_serving", "populora_adapter")) for name, *_ in samples(endpoint))
    monitor.sync(Sync(step=7, replicas=3, synced=1, seconds=4.25, waiting=True, problem="10.0.0.2: t0 not loaded"))
    assert json.loads(get(endpoint, "/status")[0])["serving"] == {
        "publishedStep": 7,
        "replicas": 3,
        "synced": 1,
        "syncSeconds": 4.25,
        "waiting": True,
        "message": "10.0.0.2: t0 not loaded",
    }
    found = samples(endpoint)
    assert found["populora_adapters_published_step",] == 7
    assert found["populora_adapter_sync_seconds",] == 4.25
    assert found["populora_serving_replicas", "synced"] == 1
    assert found["populora_serving_replicas", "behind"] == 2
    monitor.record(metrics(step=8), MEMBERS)
    monitor.sync(Sync(step=8, replicas=3, synced=3, seconds=0.5, waiting=False))
    assert samples(endpoint)["populora_serving_replicas", "behind"] == 0
