import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_run import first_state, next_state

from populora_trainer.errors import StorageError
from populora_trainer.storage.checkpoint import Adapter, collect, write_checkpoint
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.publication import (
    SERVING,
    DamagedPublication,
    Publication,
    PublishedAdapter,
    parse_publication,
    publish,
    read_publication,
)
from populora_trainer.storage.sealed import seal
from populora_trainer.storage.store import sha256

DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
ROWS = st.builds(
    lambda member, step, digest, files: {
        "member": member,
        "name": f"{member}-s{step:06d}-{digest[:8]}",
        "digest": digest,
        "files": files,
    },
    NAMES,
    st.integers(0, 10**7),
    DIGESTS,
    st.dictionaries(NAMES, DIGESTS, min_size=1),
)
ADAPTERS = st.lists(ROWS, max_size=5, unique_by=(lambda row: row["member"], lambda row: row["name"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "run")


@pytest.fixture
def adapters():
    return weights(first_state())


def weights(state) -> dict[str, Adapter]:
    return dict(zip((member.name for member in state.members), state.adapters, strict=True))


@given(st.integers(0, 10**9), ADAPTERS)
def test_every_publication_comes_back_as_it_was_written(step, rows):
    data = seal({"format": 1, "step": step, "adapters": rows})
    found = parse_publication(data)
    assert found == Publication(step, tuple(PublishedAdapter(**row) for row in rows), json.loads(data)["sha256"])


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_publication_gives_one_sentence(data):
    with pytest.raises(StorageError, match=r"^store/serving\.json (is damaged|has the format)"):
        parse_publication(data, "store/serving.json")


@given(JSON.filter(lambda step: type(step) is not int or step < 0), JSON)
def test_a_sealed_document_of_other_values_gives_one_sentence(step, adapters):
    with pytest.raises(
        StorageError, match=r"^store/serving\.json is damaged: step is .*, it must be a number of steps$"
    ):
        parse_publication(seal({"format": 1, "step": step, "adapters": adapters}), "store/serving.json")


@given(st.data())
def test_no_byte_can_be_changed_unnoticed(data):
    row = {"member": "t0", "name": "t0-s000001-aaaaaaaa", "digest": "a" * 64, "files": {"weights": "b" * 64}}
    whole = seal({"format": 1, "step": 3, "adapters": [row]})
    place = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255))
    changed = whole[:place] + bytes([byte]) + whole[place + 1 :]
    try:
        assert parse_publication(changed) == parse_publication(whole)
    except StorageError:
        assert changed != whole


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": "../../etc"}, r"adapters\[0\]\.name is '\.\./\.\./etc'"),
        ({"name": "base"}, r"adapters\[0\]\.name is 'base'; <member>-s<step>-<first 8 digits of digest>"),
        ({"name": "t0-s000001-bbbbbbbb"}, r"adapters\[0\]\.name is 't0-s000001-bbbbbbbb'"),
        ({"member": "t1"}, r"adapters\[0\]\.name is 't0-s000001-aaaaaaaa'"),
        ({"member": None}, r"adapters\[0\]\.member is 'None'"),
        ({"digest": "A" * 64}, r"adapters\[0\]\.digest"),
        ({"files": {"../x": "b" * 64}}, r"adapters\[0\]\.files is '\.\./x'"),
        ({"files": {"x": "b" * 63}}, r"adapters\[0\]\.files\[x\]"),
        ({"files": {}}, r"adapters\[0\] must be an object"),
    ],
)
def test_names_that_would_leave_a_folder_and_digests_that_are_none_are_refused(change, sentence):
    row = {"member": "t0", "name": "t0-s000001-aaaaaaaa", "digest": "a" * 64, "files": {"x": "b" * 64}, **change}
    with pytest.raises(DamagedPublication, match=sentence):
        parse_publication(seal({"format": 1, "step": 1, "adapters": [row]}))


def test_one_member_has_one_adapter():
    rows = [
        {"member": "t0", "name": name, "digest": "a" * 64, "files": {"x": "b" * 64}}
        for name in ("t0-s000001-aaaaaaaa", "t0-s000002-aaaaaaaa")
    ]
    with pytest.raises(DamagedPublication, match="two adapters have the member t0"):
        parse_publication(seal({"format": 1, "step": 1, "adapters": rows}))


def test_a_run_without_a_publication_has_none(store):
    assert read_publication(store) is None


def test_what_is_published_is_stored_and_read_back(store, adapters):
    written = publish(store, 4, adapters)
    assert read_publication(store) == written
    assert written.step == 4
    assert written.sha256 == json.loads(store.get(SERVING))["sha256"]
    for adapter, member in zip(written.adapters, adapters, strict=True):
        assert adapter.member == member
        assert adapter.name == f"{member}-s000004-{adapter.digest[:8]}"
        assert set(adapter.files) == {"adapter_config.json", "adapter_model.safetensors"}
        assert all(sha256(store.get(adapter.key(file))) == digest for file, digest in adapter.files.items())


def test_unchanged_weights_keep_their_name_and_changed_ones_get_a_new_one(store, adapters):
    first = publish(store, 1, adapters)
    changed = weights(next_state(first_state(), 1))
    member = next(name for name in adapters if adapters[name].factors is not changed[name].factors)
    second = publish(store, 2, {**adapters, member: changed[member]})
    different = {name for name in adapters if first.names[name] != second.names[name]}
    assert different == {member}
    assert second.names[member].startswith(f"{member}-s000002-")
    assert second.sha256 != first.sha256


def test_publishing_the_same_again_changes_nothing(store, adapters):
    first = publish(store, 1, adapters)
    assert publish(store, 1, adapters) == first


def test_a_damaged_publication_is_replaced_by_the_next(store, adapters):
    store.put(SERVING, b"{")
    with pytest.raises(DamagedPublication, match=r"run/serving\.json is damaged"):
        read_publication(store)
    assert publish(store, 1, adapters) == read_publication(store)


def test_an_object_of_another_length_is_written_again(store, adapters):
    (adapter, *_) = publish(store, 1, adapters).adapters
    key = adapter.key("adapter_model.safetensors")
    store.put(key, b"half")
    publish(store, 2, adapters)
    assert sha256(store.get(key)) == adapter.files["adapter_model.safetensors"]


def test_adapters_that_are_published_are_not_collected(store):
    state = first_state()
    published = publish(store, 0, weights(state))
    for step in range(3):
        write_checkpoint(store, step, state)
        state = next_state(state, step + 1)
    collect(store, 1)
    assert all(store.exists(adapter.key(file)) for adapter in published.adapters for file in adapter.files)


def test_a_publication_is_read_without_torch():
    code = (
        "import sys; import populora_trainer.storage.publication, populora_trainer.storage.run; "
        "heavy = {'torch', 'numpy', 'safetensors'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
