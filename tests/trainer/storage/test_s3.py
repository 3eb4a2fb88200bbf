import json
import os
import signal
import threading
import time

import pytest
from s3_server import ACCESS, FAULTS, SECRET, client, faulty_proxy, gateway
from toy_run import train, train_in

from populora_trainer.errors import StorageError
from populora_trainer.storage import s3
from populora_trainer.storage.checkpoint import LATEST, collect, intact, load_newest, steps
from populora_trainer.storage.logs import read_log
from populora_trainer.storage.overview import overview
from populora_trainer.storage.removal import delete_run
from populora_trainer.storage.run import Run, open_store
from populora_trainer.storage.s3 import S3Store
from populora_trainer.storage.store import AlreadyExists, MissingObject

BUCKET = "runs"
STEPS = 2
MIB = 1 << 20


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    with gateway(tmp_path_factory.mktemp("s3")) as address:
        client(address).create_bucket(Bucket=BUCKET)
        yield address


@pytest.fixture(scope="module")
def proxy(endpoint):
    with faulty_proxy(endpoint) as one:
        yield one


@pytest.fixture(autouse=True)
def _credentials(monkeypatch, request):
    for name, value in (
        ("AWS_ACCESS_KEY_ID", ACCESS),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3, "_FIRST_PAUSE", 0.01)
    if "proxy" in request.fixturenames:
        request.getfixturevalue("proxy").reset()


@pytest.fixture
def prefix(request):
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name)


@pytest.fixture
def store(endpoint, prefix):
    return S3Store(BUCKET, prefix, endpoint=endpoint)


def test_an_object_reads_back_whole_and_in_parts(store):
    store.put("steps/000001.json", b"0123456789")
    assert store.get("steps/000001.json") == b"0123456789"
    assert store.get("steps/000001.json", 3, 4) == b"3456"
    assert store.get("steps/000001.json", 8, 100) == b"89"
    assert store.get("steps/000001.json", 10) == b""
    assert store.get("steps/000001.json", 4, 0) == b""
    assert store.size("steps/000001.json") == 10
    store.put("steps/000001.json", b"")
    assert store.get("steps/000001.json", 0, 5) == b""


def test_a_missing_object_is_named(store, prefix):
    assert not store.exists("LATEST")
    for ask in (store.get, store.size):
        with pytest.raises(MissingObject, match=f"s3://runs/{prefix}/LATEST is missing"):
            ask("LATEST")
    store.delete("LATEST")


def test_of_many_creators_exactly_one_succeeds(endpoint, prefix):
    winners = []
    barrier = threading.Barrier(6)

    def create(number):
        one = S3Store(BUCKET, prefix, endpoint=endpoint)
        barrier.wait()
        try:
            one.create("steps/000001.json", b"%d" % number)
            winners.append(b"%d" % number)
        except AlreadyExists:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert winners == [S3Store(BUCKET, prefix, endpoint=endpoint).get("steps/000001.json")]


def test_list_gives_every_name_of_the_run_in_order_and_none_of_a_run_with_a_longer_name(endpoint, store, prefix):
    S3Store(BUCKET, f"{prefix}0", endpoint=endpoint).put("LATEST", b"")
    keys = sorted([*(f"adapters/{number:04d}" for number in range(1010)), "LATEST"])
    raw = client(endpoint)
    for key in keys:
        raw.put_object(Bucket=BUCKET, Key=f"{prefix}/{key}", Body=b"")
    with store.lock():
        assert store.list() == keys
    assert store.list("adapters/000") == [f"adapters/000{digit}" for digit in range(10)]


def test_a_log_grows_and_is_cut_without_sending_its_beginning_again(endpoint, store):
    store.extend("metrics.jsonl", 0, b"one\ntwo\n")
    store.extend("metrics.jsonl", 4, b"2\n")
    assert store.get("metrics.jsonl") == b"one\n2\n"
    store.extend("metrics.jsonl", 6, b"x" * (6 * MIB))
    sent = []
    store._client.meta.events.register(
        "before-send.s3", lambda request, **_: sent.append(int(request.headers.get("Content-Length", 0)))
    )
    store.extend("metrics.jsonl", 6 * MIB + 6, b"three\n")
    store.extend("metrics.jsonl", 6 * MIB, b"end")
    assert 0 < sum(sent) < 10_000
    assert store.get("metrics.jsonl") == b"one\n2\n" + b"x" * (6 * MIB - 6) + b"end"
    with pytest.raises(StorageError, match="should have at least"):
        store.extend("metrics.jsonl", 7 * MIB, b"")


def test_a_large_object_goes_up_in_parts_and_reads_back(store, monkeypatch):
    monkeypatch.setattr(s3, "_MULTIPART", 24 * MIB)
    data = os.urandom(30 * MIB)
    store.put("optimizer/large", data)
    assert store.get("optimizer/large") == data


@pytest.mark.faults
@pytest.mark.parametrize("fault", FAULTS)
def test_every_operation_survives_a_fault_in_every_request(proxy, prefix, fault, tmp_path):
    train(tmp_path / "local", STEPS)
    store = S3Store(BUCKET, prefix, endpoint=proxy.endpoint)
    # Every third request fails, so a repeated one mostly gets through, and every request fails in some of the runs.
    proxy.reset(lambda number, method, path: fault if number % 3 == 0 else None)
    train_in(store, STEPS)
    assert len(proxy.requests) > 60
    proxy.reset()
    check_finished(store, (tmp_path / "local" / LATEST).read_bytes())


def check_finished(store, latest, done=STEPS):
    assert store.get(LATEST) == latest
    assert steps(store) in ([done], [done - 1, done])
    assert all(intact(store, step) for step in steps(store))
    assert [record["step"] for record in read_log(store, "metrics")] == list(range(done + 1))
    assert [(record["step"], record["number"]) for record in read_log(store, "problems")] == [
        (step, number) for step in range(1, done + 1) for number in range(3)
    ]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("arrives", [False, True], ids=["before it arrives", "after it arrived"])
def test_a_trainer_killed_at_any_request_goes_on_to_the_same_end(trainer, proxy, prefix, tmp_path, arrives):
    train(tmp_path / "local", 1)
    expected = (tmp_path / "local" / LATEST).read_bytes()

    def run(name, kill_at):
        notes = tmp_path / f"{name}.notes"

        def choose(number, method, path):
            if number != kill_at + arrives:
                return None
            pid = json.loads(notes.read_text().splitlines()[0])["pid"]
            os.kill(pid, signal.SIGKILL)
            return "cut before"

        proxy.reset(choose)
        target = {"bucket": BUCKET, "prefix": f"{prefix}/{name}", "endpoint": proxy.endpoint}
        target["environment"] = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
        return trainer.train(tmp_path / name, 1, **target)

    code, _ = run("count", 10_000)
    assert code == 0
    methods = [method for method, _ in proxy.requests[:-1]]
    writes = [number for number, method in enumerate(methods, start=1) if method in ("PUT", "POST", "DELETE")]
    assert len(writes) > 15
    for kill_at in writes:
        name = f"killed-{kill_at}"
        code, notes = run(name, kill_at)
        assert code == -signal.SIGKILL
        store = S3Store(BUCKET, f"{prefix}/{name}", endpoint=proxy.endpoint)
        proxy.reset()
        if notes["committed"] >= 0:
            newest = load_newest(store)
            assert newest is not None
            assert newest[0].step in (notes["committed"], notes["committed"] + 1)
        assert run(name, 10_000)[0] == 0
        proxy.reset()
        check_finished(store, expected, done=1)


def test_an_earlier_trainer_stops_when_another_takes_the_run_over(endpoint, prefix):
    stores = [S3Store(BUCKET, prefix, endpoint=endpoint) for _ in range(2)]
    train_in(stores[0], 1)

    def take_over(step):
        if step == 2:
            train_in(stores[1], 3)

    with pytest.raises(StorageError, match="another trainer has taken over the run in s3://runs"):
        train_in(stores[0], 4, committed=take_over)
    assert steps(stores[1])[-1] == 3
    assert [record["step"] for record in read_log(stores[1], "metrics")] == [0, 1, 2, 3]
    train_in(stores[1], 4)
    assert steps(stores[1])[-1] == 4


def test_garbage_goes_and_nothing_that_is_referred_to(store):
    train_in(store, 3, keep=None)
    assert steps(store) == [0, 1, 2, 3]
    store.put("buffer/" + "0" * 64, b"left by a writer that died")
    assert collect(store, keep=1) == [0, 1, 2]
    assert not store.exists("buffer/" + "0" * 64)
    assert intact(store, 3)


def test_a_run_is_deleted_and_its_neighbour_with_a_longer_name_stays(endpoint, store, prefix, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    neighbour = S3Store(BUCKET, f"{prefix}0", endpoint=endpoint)
    for one in (store, neighbour):
        train_in(one, 1)
    assert delete_run(f"s3://{BUCKET}/{prefix}") == len(neighbour.list())
    assert store.list() == []
    assert intact(neighbour, 1)
    left = client(endpoint).list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
    assert left == []


def test_an_upload_in_parts_that_a_dead_trainer_left_open_is_removed(endpoint, store, prefix):
    raw = client(endpoint)
    raw.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/problems.jsonl")
    with store.lock():
        assert not raw.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads")


def test_a_damaged_object_is_never_accepted(endpoint, store, prefix):
    train_in(store, 1)
    manifest, _ = load_newest(store)
    key = f"buffer/{manifest.buffer}"
    client(endpoint).put_object(Bucket=BUCKET, Key=f"{prefix}/{key}", Body=store.get(key)[:-1])
    with pytest.raises(StorageError, match="is damaged"):
        load_newest(store)


def test_a_server_that_stays_away_is_a_sentence(proxy, prefix):
    store = S3Store(BUCKET, prefix, endpoint=proxy.endpoint)
    proxy.reset(lambda number, method, path: "slow down")
    with pytest.raises(StorageError, match=r"can't write s3://runs/.*/LATEST after 8 tries: the server answered 503"):
        store.put("LATEST", b"")
    assert len(proxy.requests) == 8


def test_what_will_not_pass_by_itself_is_not_tried_again(endpoint, proxy, monkeypatch):
    with pytest.raises(StorageError, match="the bucket nowhere does not exist"):
        S3Store("nowhere", endpoint=endpoint).put("LATEST", b"")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageError, match=r"can't write s3://runs/LATEST: the server answered 403"):
        S3Store(BUCKET, endpoint=proxy.endpoint).put("LATEST", b"")
    assert len(proxy.requests) == 1
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(StorageError, match=r"no credentials were found; set AWS_ACCESS_KEY_ID"):
        S3Store(BUCKET, endpoint=endpoint).put("LATEST", b"")


def test_a_reader_of_a_uri_needs_only_the_environment(endpoint, prefix, monkeypatch):
    train_in(S3Store(BUCKET, prefix, endpoint=endpoint), 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert overview(f"s3://{BUCKET}/{prefix}").step == 1
    for place in ("s3://", "s3:///prefix", "gs://bucket/run"):
        with pytest.raises(StorageError, match="can't hold a run"):
            open_store(place)


def test_two_processes_that_commit_the_same_step_never_mix(endpoint, prefix):
    first, second = (S3Store(BUCKET, prefix, endpoint=endpoint) for _ in range(2))
    train_in(first, 1)
    with Run.open_or_create(first, "kind: PopulationRun\n") as held:
        with Run.open_or_create(second, "kind: PopulationRun\n"):
            pass
        held.log("metrics", {"step": 2, "seconds": time.time()})
        _, state = held.latest()
        with pytest.raises(StorageError, match="another trainer"):
            held.commit(2, state)
    assert steps(second) == [1]
