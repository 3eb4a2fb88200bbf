"""The process: connects, serves metrics and health, contends for the Lease, and reconciles while it leads."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable

import aiohttp
import click
from kubernetes.aio.client.configuration import Configuration

from populora_operator.builders.context import Facts
from populora_operator.cluster.connection import NoClusterError, configuration
from populora_operator.cluster.fenced import FencedCluster
from populora_operator.cluster.kinds import CHILDREN, POD, POD_MONITOR, RUN, Kind
from populora_operator.cluster.kubernetes import KubernetesCluster
from populora_operator.cluster.port import Cluster, ClusterError, ConflictError, NotLeadingError, UnavailableError
from populora_operator.handlers import Session, registry, watch_runs
from populora_operator.health import Health
from populora_operator.leadership import Leadership
from populora_operator.metrics import Metrics
from populora_operator.progress import Reader
from populora_operator.queue import Key, WorkQueue
from populora_operator.reconciler import AgainError, Reconciler
from populora_operator.servers import serve
from populora_operator.settings import VERSION, Settings
from populora_operator.store import Store
from populora_operator.watches import ChildWatch, NamespaceWatch

logger = logging.getLogger(__name__)

DEFINITION_PAUSE_SECONDS = 3.0
KOPF_PAUSE_SECONDS = 2.0


def run(settings: Settings) -> int:
    """Run the controller until SIGTERM or Ctrl-C, and return the exit code."""
    try:
        return asyncio.run(_main(settings))
    except NoClusterError as error:
        click.echo(f"Error: {error}", err=True)
    except OSError as error:
        ports = f"--metrics-port {settings.metrics_port}, --health-port {settings.health_port}"
        click.echo(f"Error: {ports}: cannot serve there: {error.strerror or error}.", err=True)
    return 1


async def _main(settings: Settings) -> int:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()

    def take_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)

    take_signals()
    metrics, health = Metrics(), Health()
    api = await configuration(settings.kubeconfig, settings.context)
    async with KubernetesCluster(api, metrics.request) as cluster:
        leadership = Leadership(cluster, settings.lease, on_contact=lambda: health.alive("lease"))
        health.alive("lease")
        metrics.leading, metrics.watch_ages = lambda: leadership.leading, health.ages
        started = asyncio.Event()
        async with serve(metrics, settings.metrics_port, settings.health_port, health.problems, ready=started.is_set):
            logger.info("populora controller %s at %s", VERSION, api.host)
            controller = Controller(cluster, api, leadership, settings, metrics, health, take_signals)
            work = asyncio.create_task(_contend(cluster, leadership, controller, started))
            stop = asyncio.create_task(stopping.wait())
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            work.cancel()
            results = await asyncio.gather(work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            logger.error("the controller ends: %s", result, exc_info=result)
            return 1
    logger.info("stopped")
    return 0


async def _contend(cluster: Cluster, leadership: Leadership, controller: "Controller", started: asyncio.Event) -> None:
    await _wait_for_definition(cluster)
    started.set()
    # The election ends first: the Lease is given back as soon as nothing writes any more.
    watching = asyncio.create_task(controller.watch())
    electing = asyncio.create_task(leadership.run(controller.lead))
    try:
        done, _ = await asyncio.wait((watching, electing), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (electing, watching):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _wait_for_definition(cluster: Cluster) -> None:
    """Wait until the API server knows PopulationRun: the definition may be installed after the controller."""
    while True:
        try:
            if await cluster.serves(RUN):
                return
            logger.warning("the API server does not know %s.%s yet: install the chart's CRD", RUN.plural, RUN.group)
        except ClusterError as error:
            logger.warning("the API server is not there yet: %s", error)
        await asyncio.sleep(DEFINITION_PAUSE_SECONDS)


class Controller:
    """One replica. It watches all the time, so that it knows everything when it begins to lead.

    What it remembers of runs while it leads is made anew for each term.
    """

    def __init__(
        self,
        cluster: Cluster,
        api: Configuration,
        leadership: Leadership,
        settings: Settings,
        metrics: Metrics,
        health: Health,
        take_signals: Callable[[], None],
    ):
        self._cluster, self._api, self._leadership, self._settings = cluster, api, leadership, settings
        self._metrics, self._health, self._take_signals = metrics, health, take_signals
        self._store, self._runs = Store(), set[Key]()
        self._watches: list[ChildWatch] = []
        self._leaving = set[str]()
        self._places: tuple[str | None, ...] = settings.namespaces or (None,)
        self._monitors = Discovery(cluster, POD_MONITOR)
        self._term: tuple[WorkQueue, Reconciler] | None = None

    async def watch(self) -> None:
        """Watch runs and their children until cancelled.

        Each namespace is watched for itself, so that one that goes disturbs no other.
        """
        async with asyncio.TaskGroup() as tasks:
            for kind in (*CHILDREN, POD):
                if kind is not POD_MONITOR:
                    self._watch_kind(tasks, kind)
            for namespace in self._places:
                watch = NamespaceWatch(self._cluster, namespace, self._leaving, self._health, self._namespace_leaves)
                tasks.create_task(watch.run())
                tasks.create_task(self._watch_runs(namespace))
            tasks.create_task(self._watch_monitors(tasks))

    async def lead(self) -> None:
        """Reconcile until cancelled."""
        cluster = FencedCluster(self._cluster, self._leadership.remaining)
        queue = WorkQueue()
        connector = aiohttp.TCPConnector(limit=64, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
            reconciler = Reconciler(
                cluster,
                self._store,
                Reader(session),
                self._settings,
                facts=lambda: Facts(pod_monitors=self._monitors.served),
                leaving=self._leaving.__contains__,
            )
            await self._monitors.looked.wait()
            await asyncio.gather(*(watch.answered.wait() for watch in self._watches))
            self._term = (queue, reconciler)
            self._metrics.queue_depth, self._metrics.statuses = lambda: len(queue), reconciler.statuses
            try:
                for key in self._runs | self._store.runs():
                    queue.add(key)
                for _ in range(self._settings.workers):
                    tasks.create_task(self._work(queue, reconciler))
                await asyncio.Event().wait()
            finally:
                self._term = None
                queue.close()
                self._metrics.queue_depth, self._metrics.statuses = lambda: 0, tuple

    def _watch_kind(self, tasks: asyncio.TaskGroup, kind: Kind) -> None:
        for namespace in self._places:
            watch = ChildWatch(self._cluster, kind, namespace, self._store, self._health, self._child_changed)
            self._watches.append(watch)
            tasks.create_task(watch.run())

    def _child_changed(self, key: Key) -> None:
        if self._term is not None:
            self._term[0].add(key)

    def _namespace_leaves(self, namespace: str) -> None:
        if self._term is not None:
            for key in self._runs:
                if key[0] == namespace:
                    self._term[0].add(key)

    def _run_changed(self, key: Key, version: str) -> None:
        (self._runs.add if version else self._runs.discard)(key)
        if self._term is not None and not self._term[1].is_known(key, version):
            self._term[0].add(key)

    def _check_knowledge(self, namespace: str) -> None:
        """Raise ClusterError unless all children in a namespace are known, as every decision rests on them."""
        for watch in self._watches:
            if watch.namespace in (None, namespace) and not watch.listed:
                raise UnavailableError(f"{watch.source} are not known")

    async def _watch_runs(self, namespace: str | None) -> None:
        source = RUN.plural if namespace is None else f"{RUN.plural} in {namespace}"
        session = Session(self._api, lambda: self._health.alive(source))
        handlers = registry(self._run_changed, session.open)
        self._health.alive(source)
        try:
            while True:
                try:
                    await watch_runs(handlers, namespace, self._take_signals)
                except UnavailableError as error:
                    logger.warning("%s: again in %.0f s", error, KOPF_PAUSE_SECONDS)
                finally:
                    await session.close()
                await asyncio.sleep(KOPF_PAUSE_SECONDS)
        finally:
            self._health.forget(source)

    async def _watch_monitors(self, tasks: asyncio.TaskGroup) -> None:
        """Watch PodMonitors once the cluster knows the kind; each run gets its own at its next look."""
        await self._monitors.look()
        while not self._monitors.served:
            await asyncio.sleep(self._settings.resync_seconds)
            await self._monitors.look()
        self._watch_kind(tasks, POD_MONITOR)

    async def _work(self, queue: WorkQueue, reconciler: Reconciler) -> None:
        while True:
            work = await queue.take()
            started = time.perf_counter()
            error: Exception | None = None
            try:
                self._check_knowledge(work.key[0])
                again = await reconciler.reconcile(work)
                queue.succeed(work.key)
                if again is None:
                    queue.forget(work.key)
                else:
                    queue.add_after(work.key, again)
            except (AgainError, ConflictError) as caught:
                queue.fail(work.key)
                logger.debug("%s/%s: %s", *work.key, caught)
            except ClusterError as caught:
                error = caught
                seconds = queue.fail(work.key, caught.retry_after or 0.0)
                level = logging.DEBUG if isinstance(caught, NotLeadingError) else logging.WARNING
                logger.log(level, "%s/%s: again in %.1f s: %s", *work.key, seconds, caught)
            except Exception as caught:
                # A defect that one run brings to light must not take the others with it.
                error = caught
                seconds = queue.fail(work.key)
                logger.exception("%s/%s: again in %.1f s", *work.key, seconds)
            finally:
                queue.done(work.key)
                self._metrics.reconciled(started, error)


class Discovery:
    """Whether the cluster knows a kind that is not in every cluster."""

    def __init__(self, cluster: Cluster, kind: Kind):
        self._cluster, self._kind = cluster, kind
        self.served = False
        self.looked = asyncio.Event()

    async def look(self) -> None:
        """Ask the API server; where it does not answer, nothing is new."""
        with contextlib.suppress(ClusterError):
            self.served = await self._cluster.serves(self._kind)
        self.looked.set()
