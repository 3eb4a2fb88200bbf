"""The election in virtual time: one leader at a time, whatever the API server and the replicas do."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from fake_cluster import FakeCluster
from virtual_time import run

from populora_operator.cluster.fenced import FencedCluster
from populora_operator.cluster.kinds import CONFIG_MAP, LEASE, Kind
from populora_operator.cluster.port import NotLeadingError, Object, UnavailableError
from populora_operator.leadership import Leadership
from populora_operator.settings import LeaseSettings


class Replica:
    """A contender that notes when it leads."""

    def __init__(self, cluster: Any, identity: str) -> None:
        self.leadership = Leadership(cluster, LeaseSettings("ns", "lease", identity))
        self.terms: list[tuple[float, float]] = []
        self.task = asyncio.create_task(self.leadership.run(self.lead))

    async def lead(self) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            await asyncio.Event().wait()
        finally:
            self.terms.append((begin, loop.time()))

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Flaky:
    """Passes on to a cluster unless the network is cut."""

    def __init__(self, inner: FakeCluster) -> None:
        self.inner, self.cut, self.slow, self.late = inner, False, 0.0, 0.0

    async def _pass(self, request: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.slow)
        if self.cut:
            raise UnavailableError("no route to host")
        answer = await request()
        await asyncio.sleep(self.late)
        return answer

    async def get(self, kind: Kind, namespace: str, name: str) -> Any:
        return await self._pass(lambda: self.inner.get(kind, namespace, name))

    async def create(self, kind: Kind, item: Object) -> Any:
        return await self._pass(lambda: self.inner.create(kind, item))

    async def replace(self, kind: Kind, item: Object) -> Any:
        return await self._pass(lambda: self.inner.replace(kind, item))


def test_one_replica_leads_and_the_other_waits() -> None:
    async def story() -> None:
        cluster = FakeCluster()
        first = Replica(cluster, "first")
        await asyncio.sleep(1)
        second = Replica(cluster, "second")
        await asyncio.sleep(3600)
        assert first.leadership.leading
        assert not second.leadership.leading
        spec = cluster.one(LEASE, "lease")["spec"]
        assert spec["holderIdentity"] == "first"
        assert spec["leaseTransitions"] == 0
        await first.stop()
        await second.stop()

    run(story())


def test_a_leader_that_stops_hands_over_at_once() -> None:
    async def story() -> None:
        cluster = FakeCluster()
        first = Replica(cluster, "first")
        await asyncio.sleep(1)
        second = Replica(cluster, "second")
        await asyncio.sleep(10)
        await first.stop()
        stopped = asyncio.get_running_loop().time()
        await asyncio.sleep(5)
        assert second.leadership.leading
        await second.stop()
        assert second.terms[0][0] - stopped <= 2.5
        assert cluster.one(LEASE, "lease")["spec"]["leaseTransitions"] == 1

    run(story())


def test_a_leader_that_stops_while_a_renewal_has_arrived_and_is_not_answered_frees_the_lease() -> None:
    async def story() -> None:
        cluster = FakeCluster()
        network = Flaky(cluster)
        first = Replica(network, "first")
        await asyncio.sleep(0.5)
        taken = cluster.one(LEASE, "lease")
        network.late = 1.0
        await asyncio.sleep(2)
        assert cluster.one(LEASE, "lease") != taken
        await first.stop()
        assert cluster.one(LEASE, "lease")["spec"]["holderIdentity"] == ""

    run(story())


def test_a_leader_that_stops_leaves_the_lease_to_another_that_has_taken_it() -> None:
    async def story() -> None:
        cluster = FakeCluster()
        first = Replica(cluster, "first")
        await asyncio.sleep(0.5)
        lease = cluster.one(LEASE, "lease")
        await cluster.replace(LEASE, {**lease, "spec": {**lease["spec"], "holderIdentity": "second"}})
        await first.stop()
        assert cluster.one(LEASE, "lease")["spec"]["holderIdentity"] == "second"

    run(story())


def test_a_leader_that_dies_is_followed_within_thirty_seconds() -> None:
    async def story() -> None:
        inner = FakeCluster()
        network = Flaky(inner)
        first, second = Replica(network, "first"), None
        await asyncio.sleep(10)
        second = Replica(inner, "second")
        await asyncio.sleep(10)
        network.cut = True  # for the first replica this is as good as a death
        died = asyncio.get_running_loop().time()
        await asyncio.sleep(60)
        assert second.leadership.leading
        await first.stop()
        await second.stop()
        assert second.terms[0][0] - died <= 30

    run(story())


def test_two_replicas_never_lead_at_the_same_time() -> None:
    async def story() -> None:
        inner = FakeCluster()
        networks = [Flaky(inner) for _ in range(2)]
        replicas = [Replica(network, str(number)) for number, network in enumerate(networks)]
        for turn in range(20):
            networks[turn % 2].cut = True
            await asyncio.sleep(37)
            networks[turn % 2].cut = False
            networks[turn % 2].slow = float(turn % 5)
            await asyncio.sleep(23)
        for replica in replicas:
            await replica.stop()
        terms = sorted(term for replica in replicas for term in replica.terms)
        assert len(terms) > 10
        for (_, end), (begin, _) in itertools.pairwise(terms):
            assert end <= begin

    run(story())


def test_an_outage_shorter_than_the_deadline_costs_no_term() -> None:
    async def story() -> None:
        network = Flaky(FakeCluster())
        only = Replica(network, "only")
        await asyncio.sleep(10)
        network.cut = True
        await asyncio.sleep(7)
        network.cut = False
        await asyncio.sleep(30)
        assert only.leadership.leading
        await only.stop()
        assert len(only.terms) == 1

    run(story())


def test_an_error_of_the_leader_ends_the_process_and_frees_the_lease() -> None:
    async def story() -> None:
        cluster = FakeCluster()
        leadership = Leadership(cluster, LeaseSettings("ns", "lease", "me"))

        async def lead() -> None:
            await asyncio.sleep(1)
            raise ValueError("a defect")

        with pytest.raises(ValueError, match="a defect"):
            await leadership.run(lead)
        assert cluster.one(LEASE, "lease")["spec"]["holderIdentity"] == ""

    run(story())


def test_nothing_is_written_without_the_lease() -> None:
    async def story() -> None:
        left = [5.0]
        inner = FakeCluster()
        fenced = FencedCluster(inner, lambda: left[0])
        item = {"metadata": {"namespace": "ns", "name": "a"}, "data": {}}
        await fenced.apply(CONFIG_MAP, item, manager="m")
        left[0] = 0.0
        for request in (
            fenced.apply(CONFIG_MAP, item, manager="m"),
            fenced.create(CONFIG_MAP, item),
            fenced.replace(CONFIG_MAP, item),
            fenced.delete(CONFIG_MAP, "ns", "a"),
        ):
            with pytest.raises(NotLeadingError):
                await request
        assert len(inner.writes) == 1
        assert (await fenced.get(CONFIG_MAP, "ns", "a"))["metadata"]["name"] == "a", "reading is always allowed"

    run(story())


def test_a_write_is_given_up_before_another_replica_may_lead() -> None:
    async def story() -> None:
        class Slow(FakeCluster):
            async def delete(self, *args: Any, **kwargs: Any) -> None:
                await asyncio.sleep(60)

        fenced = FencedCluster(Slow(), lambda: 4.0)
        with pytest.raises(UnavailableError):
            await fenced.delete(CONFIG_MAP, "ns", "a")
        assert asyncio.get_running_loop().time() == pytest.approx(4.0)

    run(story())
