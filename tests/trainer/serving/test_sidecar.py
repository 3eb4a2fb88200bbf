import asyncio
from dataclasses import replace

import pytest
from rig import LIMITS, Rig, rig, sidecar

from populora_trainer.serving.planning import root
from populora_trainer.storage.publication import SERVING


def play(tmp_path, scene, limits=LIMITS):
    async def run():
        async with rig(tmp_path, limits) as made:
            await scene(made)

    asyncio.run(run())


def loads(made: Rig) -> list[str]:
    return [str(body["lora_name"]) for path, body in made.vllm.calls if path == "/v1/load_lora_adapter"]


def metric(made: Rig, name: str, **labels: str) -> float:
    value = made.sidecar.metrics.registry.get_sample_value(f"populora_sidecar_{name}", labels)
    assert value is not None
    return value


def test_with_nothing_published_a_healthy_server_is_ready(tmp_path):
    async def scene(made: Rig):
        await made.until(lambda: made.sidecar.unready() is None, "readiness")
        assert made.sidecar.status() == {
            "publication": None,
            "step": None,
            "adapters": {},
            "seen": None,
            "error": None,
        }

    play(tmp_path, scene)


def test_what_is_published_is_downloaded_loaded_and_told(tmp_path):
    async def scene(made: Rig):
        published = made.trainer.publish(3, t0="one", s0="two")
        await made.until_serves(published)
        assert made.vllm.adapters == {one.name: root(made.folder, one) for one in published.adapters}
        assert made.sidecar.status() == {
            "publication": published.sha256,
            "step": 3,
            "adapters": {one.name: one.digest for one in published.adapters},
            "seen": published.sha256,
            "error": None,
        }
        assert made.sidecar.unready() is None
        assert (metric(made, "adapters_loaded"), metric(made, "loads_total")) == (2, 2)
        assert (metric(made, "published_step"), metric(made, "served_step")) == (3, 3)
        assert metric(made, "sync_seconds_count") == 1
        assert metric(made, "sync_lag_seconds") == 0
        assert metric(made, "download_bytes_total") == sum(
            len(data) for files in made.trainer.contents.values() for data in files.values()
        )

    play(tmp_path, scene)


def test_nothing_is_ever_loaded_in_place(tmp_path):
    async def scene(made: Rig):
        for step in range(3):
            await made.until_serves(made.trainer.publish(step, t0=f"weights {step}"))
        assert all(set(body) <= {"lora_name", "lora_path"} for _, body in made.vllm.calls)
        assert len(set(loads(made))) == len(loads(made)) == 3

    play(tmp_path, scene)


def test_the_newest_two_publications_stay_loaded_and_older_ones_go(tmp_path):
    async def scene(made: Rig):
        published = []
        for step in range(5):
            published.append(made.trainer.publish(step, t0=f"t{step}", s0=f"s{step}"))
            await made.until_serves(published[-1])
            newest = {one.name for publication in published[-2:] for one in publication.adapters}
            assert set(made.vllm.adapters) == newest
        assert made.vllm.most == 4
        await made.until(lambda: len(list(made.folder.iterdir())) == 4, "the removal of older folders")
        assert metric(made, "unloads_total") == 6

    play(tmp_path, scene)


def test_an_adapter_that_did_not_change_is_not_loaded_again(tmp_path):
    async def scene(made: Rig):
        await made.until_serves(made.trainer.publish(1, t0="same", s0="old"))
        for step in range(2, 5):
            await made.until_serves(made.trainer.publish(step, t0="same", s0=f"new {step}"))
        assert sum(name.startswith("t0-") for name in loads(made)) == 1
        assert made.sidecar.status()["step"] == 4

    play(tmp_path, scene)


def test_equal_weights_of_two_members_are_downloaded_once_and_served_under_both_names(tmp_path):
    async def scene(made: Rig):
        published = made.trainer.publish(0, t0="equal", t1="equal")
        await made.until_serves(published)
        assert len(made.vllm.adapters) == 2
        assert metric(made, "download_bytes_total") == len("equal") + 2

    play(tmp_path, scene)


def test_a_server_that_was_started_again_is_unready_until_it_has_every_adapter_back(tmp_path):
    async def scene(made: Rig):
        published = made.trainer.publish(1, t0="one", s0="two")
        await made.until_serves(published)
        await made.vllm.stop()
        await made.until(lambda: made.sidecar.unready() is not None, "the loss of readiness")
        assert "can't be reached" in str(made.sidecar.unready())
        assert made.sidecar.status()["publication"] is None
        made.vllm.hanging.add("/v1/load_lora_adapter")
        await made.vllm.start()
        await made.until(lambda: "are not loaded" in str(made.sidecar.unready()), "the word that they are missing")
        made.vllm.hanging.clear()
        await made.until(lambda: made.sidecar.unready() is None, "readiness")
        assert len(made.vllm.adapters) == 2
        assert metric(made, "download_bytes_total") == 2 * 2 + len("one") + len("two"), "nothing is downloaded again"

    play(tmp_path, scene)


def test_a_dead_engine_makes_the_replica_unready_at_once(tmp_path):
    async def scene(made: Rig):
        await made.until_serves(made.trainer.publish(1, t0="one"))
        made.vllm.healthy = False
        await made.until(lambda: "is not healthy: it answered 503" in str(made.sidecar.unready()), "the word of it")
        made.vllm.healthy = True
        await made.until(lambda: made.sidecar.unready() is None, "readiness")

    play(tmp_path, scene)


def test_a_server_that_is_slow_for_a_moment_stays_ready_and_one_that_hangs_does_not(tmp_path):
    async def scene(made: Rig):
        await made.until_serves(made.trainer.publish(1, t0="one"))
        made.vllm.hanging.add("/health")
        await made.until(lambda: made.sidecar.status()["error"], "an error")
        assert "has not answered /health within 1 s" in str(made.sidecar.status()["error"])
        assert made.sidecar.unready() is None
        await made.until(lambda: made.sidecar.unready() is not None, "the loss of readiness")
        made.vllm.hanging.clear()
        await made.until(lambda: made.sidecar.unready() is None, "readiness")

    play(tmp_path, scene)


def test_a_new_sidecar_finds_its_server_as_it_is_and_loads_nothing_twice(tmp_path):
    async def scene(made: Rig):
        old, new = made.trainer.publish(1, t0="old", s0="same"), None
        await made.until_serves(old)
        new = made.trainer.publish(2, t0="new", s0="same")
        await made.until_serves(new)
        count = len(loads(made))
        async with sidecar(made.store, made.vllm.url, made.folder) as second:
            await made.until(lambda: second.unready() is None, "the second's readiness")
            assert second.status()["publication"] == new.sha256
        assert len(loads(made)) == count

    play(tmp_path, scene)


def test_a_new_sidecar_is_unready_until_what_was_newest_at_its_first_look_is_loaded(tmp_path):
    async def scene(made: Rig):
        made.vllm.hanging.add("/v1/load_lora_adapter")
        made.trainer.publish(1, t0="one")
        async with sidecar(made.store, made.vllm.url, made.folder) as second:
            await made.until(lambda: second.status()["seen"] and second.status()["error"], "a look")
            assert second.unready() is not None
            made.vllm.hanging.clear()
            await made.until(lambda: second.unready() is None, "readiness")

    play(tmp_path, scene)


def test_a_damaged_object_is_refused_and_told_while_the_old_adapters_and_the_other_new_ones_serve(tmp_path):
    async def scene(made: Rig):
        old = made.trainer.publish(1, t0="old t0", s0="old s0")
        await made.until_serves(old)
        made.store.broken = True
        new = made.trainer.publish(2, t0="new t0", s0="new s0")
        good, bad = new.adapters
        key = bad.key("adapter_model.safetensors")
        made.store.store.put(key, b"damaged")
        made.store.broken = False
        await made.until(lambda: good.name in made.vllm.adapters and made.sidecar.status()["error"], "the first's load")
        status = made.sidecar.status()
        assert f"{key} is damaged, so {bad.name} is not loaded: its 7 bytes have the sha256" in str(status["error"])
        assert (status["publication"], status["seen"]) == (old.sha256, new.sha256)
        assert bad.name not in made.vllm.adapters
        assert {one.name for one in old.adapters} <= set(made.vllm.adapters)
        await made.until(lambda: metric(made, "failures_total", kind="damaged") >= 2, "another try")
        assert metric(made, "sync_lag_seconds") > 0
        made.store.store.put(key, b"new s0")
        await made.until_serves(new)
        assert made.sidecar.status()["error"] is None

    play(tmp_path, scene)


def test_a_newer_publication_makes_the_replica_unready_only_when_it_stays_unloaded(tmp_path):
    async def scene(made: Rig):
        await made.until_serves(made.trainer.publish(1, t0="old"))
        made.store.broken = True
        new = made.trainer.publish(2, t0="new")
        made.vllm.refusing.add(new.adapters[0].name)
        made.store.broken = False
        await made.until(lambda: made.sidecar.status()["error"], "an error")
        assert made.sidecar.unready() is None
        await made.until(lambda: made.sidecar.unready() is not None, "the loss of readiness")
        reason = str(made.sidecar.unready())
        assert reason.startswith(f"{new.adapters[0].name} of step 2 are not loaded: ")
        assert "it answered 400 LoRA rank 64 is greater than max_lora_rank 8." in reason
        assert metric(made, "failures_total", kind="refused") > 0
        made.vllm.refusing.clear()
        await made.until(lambda: made.sidecar.unready() is None, "readiness")

    play(tmp_path, scene)


def test_an_answer_that_is_not_true_is_not_believed(tmp_path):
    async def scene(made: Rig):
        made.vllm.lying = True
        published = made.trainer.publish(1, t0="one")
        await made.until(lambda: made.sidecar.status()["error"], "an error")
        assert "has loaded adapters and does not serve them" in str(made.sidecar.status()["error"])
        assert made.sidecar.unready() is not None
        made.vllm.lying = False
        await made.until_serves(published)

    play(tmp_path, scene)


def test_an_outage_of_the_storage_is_told_and_takes_no_readiness_away(tmp_path):
    async def scene(made: Rig):
        old = made.trainer.publish(1, t0="old")
        await made.until_serves(old)
        made.store.broken = True
        await made.until(lambda: made.sidecar.status()["error"], "an error")
        assert "after 3 tries: connection refused" in str(made.sidecar.status()["error"])
        assert made.sidecar.unready() is None
        await made.vllm.stop()
        await made.vllm.start()
        await made.until(lambda: made.vllm.adapters, "a load from the folder, without the storage")
        new = made.trainer.publish(2, t0="new")
        made.store.broken = False
        await made.until_serves(new)
        assert made.sidecar.status()["error"] is None

    play(tmp_path, scene)


def test_a_storage_that_was_never_read_makes_the_replica_unready(tmp_path):
    async def scene(made: Rig):
        made.store.broken = True
        made.trainer.publish(1, t0="one")
        async with sidecar(made.store, made.vllm.url, made.folder) as second:
            await made.until(lambda: "connection refused" in str(second.unready()), "the word of it")
            made.store.broken = False
            await made.until(lambda: second.unready() is None, "readiness")

    play(tmp_path, scene)


def test_a_damaged_publication_is_told_and_the_last_good_one_stays(tmp_path):
    async def scene(made: Rig):
        good = made.trainer.publish(1, t0="one")
        await made.until_serves(good)
        made.store.store.put(SERVING, b"{}")
        await made.until(lambda: made.sidecar.status()["error"], "an error")
        assert "serving.json is damaged: it is not a publication of adapters" in str(made.sidecar.status()["error"])
        assert made.sidecar.status()["publication"] == good.sha256
        assert metric(made, "failures_total", kind="damaged") > 0

    play(tmp_path, scene)


def test_adapters_that_somebody_else_loaded_stay(tmp_path):
    async def scene(made: Rig):
        made.vllm.adapters["mine"] = "/elsewhere/mine"
        for step in range(3):
            await made.until_serves(made.trainer.publish(step, t0=f"weights {step}"))
        assert made.vllm.adapters["mine"] == "/elsewhere/mine"
        assert "mine" not in made.sidecar.status()["adapters"]  # type: ignore[operator]

    play(tmp_path, scene)


def test_one_hanging_replica_does_not_hold_up_another(tmp_path):
    async def scene(made: Rig):
        made.vllm.hanging |= {"/health", "/v1/models", "/v1/load_lora_adapter"}
        async with rig(tmp_path / "other") as other, sidecar(made.store, other.vllm.url, tmp_path / "third") as second:
            published = made.trainer.publish(1, t0="one")
            await made.until(lambda: second.status()["publication"] == published.sha256, "the other replica's load")
            assert made.sidecar.unready() is not None

    play(tmp_path, scene)


def test_a_refresh_looks_at_once(tmp_path):
    async def scene(made: Rig):
        await made.until(lambda: made.sidecar.unready() is None, "readiness")
        published = made.trainer.publish(1, t0="one")
        made.sidecar.refresh()
        await made.until_serves(published)

    play(tmp_path, scene, replace(LIMITS, interval=3600.0))


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/models"])
def test_a_call_that_hangs_is_given_up_and_tried_again(path, tmp_path):
    async def scene(made: Rig):
        await made.until(lambda: made.sidecar.unready() is None, "readiness")
        made.vllm.hanging.add(path)
        published = made.trainer.publish(1, t0="one")
        await made.until(lambda: f"has not answered {path}" in str(made.sidecar.status()["error"]), "the word of it")
        assert metric(made, "failures_total", kind="vllm") > 0
        made.vllm.hanging.clear()
        await made.until_serves(published)

    play(tmp_path, scene)


def test_a_flood_of_requests_to_look_floods_neither_the_storage_nor_vllm(tmp_path):
    async def scene(made: Rig):
        loop = asyncio.get_running_loop()
        await made.until(lambda: made.sidecar.unready() is None, "readiness")
        began, reads, calls = loop.time(), made.store.reads, len(made.vllm.calls)
        while loop.time() < began + 0.3:
            made.sidecar.refresh()
            await asyncio.sleep(0)
        turns = (loop.time() - began) / 0.02 + 2
        assert made.store.reads - reads <= turns
        assert len(made.vllm.calls) - calls <= 2 * turns  # its health, and what it serves
        await made.until_serves(made.trainer.publish(1, t0="one"))

    play(tmp_path, scene, replace(LIMITS, interval=30.0))


def test_what_a_user_keeps_in_the_folder_stays(tmp_path):
    mine = tmp_path / "adapters" / "papers"
    mine.mkdir(parents=True)
    (mine / "one.pdf").write_text("mine")

    async def scene(made: Rig):
        for step in (1, 2, 3):
            await made.until_serves(made.trainer.publish(step, t0=f"weights {step}"))
        await made.turns()
        assert (mine / "one.pdf").read_text() == "mine"

    play(tmp_path, scene)
