"""What to do so that vLLM serves a publication: pure functions of what is wanted, served and stored."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from populora_trainer.storage.publication import Publication, PublishedAdapter


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps, in the order in which they are taken.

    Attributes:
        unload: names that vLLM shall no longer serve; first, so that at most two publications are loaded at a time.
        download: one adapter of each digest that is not in the folder yet.
        load: adapters that vLLM shall serve besides those that it does.
        discard: digests whose folders nobody needs any more.
    """

    unload: tuple[str, ...]
    download: tuple[PublishedAdapter, ...]
    load: tuple[PublishedAdapter, ...]
    discard: tuple[str, ...]


def make_plan(
    wanted: Publication,
    before: Publication | None,
    served: Mapping[str, str],
    stored: Collection[str],
    folder: PurePath,
) -> Plan:
    """Return what to do.

    Args:
        wanted: the newest publication.
        before: the one that was wholly loaded before it, whose adapters stay as requests may still name them.
        served: vLLM's adapters: name to the path that it read them from.
        stored: digests of the adapters that are whole in the folder.
        folder: that vLLM reads adapters from, at the same path as here.

    Returns:
        The plan. Adapters that somebody else gave to vLLM, from another folder and under other names, are left alone.
    """
    roots = {one.name: root(folder, one) for one in wanted.adapters}
    if before is not None:
        roots = {one.name: root(folder, one) for one in before.adapters} | roots
    unload = tuple(
        name
        for name, path in served.items()
        if (path != roots[name] if name in roots else PurePath(path).parent == folder)
    )
    load = tuple(one for one in wanted.adapters if served.get(one.name) != roots[one.name])
    missing = {one.digest: one for one in load if one.digest not in stored}
    needed = {PurePath(path).name for path in roots.values()}
    return Plan(unload, tuple(missing.values()), load, tuple(sorted(set(stored) - needed)))


def is_served(publication: Publication, served: Mapping[str, str], folder: PurePath) -> bool:
    """Return whether vLLM serves every adapter of a publication, each from where it was put."""
    return all(served.get(one.name) == root(folder, one) for one in publication.adapters)


def digests(served: Mapping[str, str], folder: PurePath) -> dict[str, str]:
    """Return the digest of each adapter of the folder that vLLM serves, by name."""
    return {name: PurePath(path).name for name, path in served.items() if PurePath(path).parent == folder}


def root(folder: PurePath, adapter: PublishedAdapter) -> str:
    """Return the path that vLLM reads an adapter from, and tells in `/v1/models`."""
    return str(folder / adapter.digest)
