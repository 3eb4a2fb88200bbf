"""`populora controller` as a process of its own, with what a test needs to start, watch and kill it."""

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from client import PATIENCE_SECONDS, Api, Object, eventually
from control_plane import ControlPlane, die_with_parent
from forks import Fork, ForkServer

from populora_operator.permissions import role_rules

POPULORA = Path(sys.executable).parent / "populora"
ACCOUNT = "populora-controller"
LEASE = "populora-controller"
Process = subprocess.Popen[bytes] | Fork


class Controller:
    """One controller process.

    Args:
        plane: its cluster.
        namespace: whose runs it reconciles, and of its Lease; all and `default` where it is None.
        token: what it authenticates with; the administrator's where none is given.
        url: of a proxy, instead of the API server.
        identity: in the Lease; the same one again takes over at once from a process that was killed.
        options: further words of the command line.
        forks: starts the process by a fork, which takes no seconds; without it the installed command is run.
    """

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str | None,
        *,
        token: str | None = None,
        url: str | None = None,
        identity: str = "first",
        options: tuple[str, ...] = (),
        forks: ForkServer | None = None,
    ) -> None:
        self.identity, self.namespace = identity, namespace
        # Beside the control plane's logs, which are kept where a test has failed.
        folder = plane.folder / "controllers" / (namespace or "everywhere")
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"controller-{identity}.log"
        kubeconfig = plane.write_kubeconfig(folder / f"{identity}.kubeconfig", token or plane.token, url=url)
        self.metrics_port, self.health_port = _free_port(), _free_port()
        self.arguments = [
            f"--kubeconfig={kubeconfig}",
            *([f"--namespace={namespace}"] if namespace else []),
            f"--lease-namespace={namespace or 'default'}",
            f"--identity={identity}",
            f"--metrics-port={self.metrics_port}",
            f"--health-port={self.health_port}",
            "--status-poll-seconds=0.3",
            "--lease-seconds=15",
            "--log-level=debug",
            *options,
        ]
        self.forks = forks
        self.process: Process | None = None

    def __enter__(self) -> "Controller":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if kind is not None and value is not None:
            value.add_note(f"The end of the controller's log:\n{self.tail()}")

    def start(self) -> "Controller":
        """Start the process; it is not ready yet."""
        if self.forks is not None:
            self.process = self.forks.start(self.arguments, self.log)
            return self
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [str(POPULORA), "controller", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return self

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and return the exit status."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"The controller does not stop on SIGTERM:\n{self.tail()}") from None
        return self.process.returncode

    def ready(self) -> "Controller":
        """Wait until the process says that it is ready."""
        eventually(lambda: self.probe("readyz") == 200 or None, "the controller is ready", otherwise=self.tail)
        return self

    def probe(self, path: str) -> int | None:
        """Return the status code of a probe, None where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def metrics(self) -> str:
        """Return the text of /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""


def grant(api: Api, namespace: str, account: str = ACCOUNT, *, also: tuple[str, ...] = ()) -> str:
    """Make a ServiceAccount with exactly the permissions of a namespaced install; return a token of it.

    Args:
        api: of the cluster.
        namespace: of the account, the Lease and of runs.
        account: its name.
        also: further namespaces of runs.
    """
    for other in also:
        _bind(api, other, account, {"Role": role_rules("runs")}, home=namespace)
    return _grant(api, namespace, account, {"Role": role_rules("runs") + role_rules("lease")})


def grant_everywhere(api: Api, account: str = ACCOUNT) -> str:
    """Do the same for a cluster-wide install in the namespace `default`."""
    return _grant(api, "default", account, {"ClusterRole": role_rules("runs"), "Role": role_rules("lease")})


def _grant(api: Api, namespace: str, account: str, roles: dict[str, list[Object]]) -> str:
    _make(api, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}, namespace)
    _bind(api, namespace, account, roles, home=namespace)
    return api.token(account, namespace)


def _bind(api: Api, namespace: str, account: str, roles: dict[str, list[Object]], *, home: str) -> None:
    for kind, rules in roles.items():
        _make(api, _rbac(kind, account, rules=rules), namespace)
        subjects = [{"kind": "ServiceAccount", "name": account, "namespace": home}]
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": account}
        _make(api, _rbac(f"{kind}Binding", account, subjects=subjects, roleRef=reference), namespace)


def user_of(namespace: str, account: str = ACCOUNT) -> str:
    """Return the name of the ServiceAccount in the audit log."""
    return f"system:serviceaccount:{namespace}:{account}"


def _rbac(kind: str, name: str, **fields: object) -> Object:
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": {"name": name}, **fields}


def _make(api: Api, value: Object, namespace: str) -> None:
    api.apply(value, namespace, manager="install")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
