"""A Kubernetes control plane on loopback: etcd, API server, controller manager, scheduler. Needs no root.

python tests/cluster/control_plane.py [--crd] [--node]     start one, print its kubeconfig, stop it on Ctrl-C
"""

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from build import CONTROL_PLANE, BuildError, Say, binaries, say_on_stderr

PATIENCE_SECONDS = 180
"""How long a process may take to be ready on a busy machine."""

ADMIN = "admin"
CONTROLLER_MANAGER = "system:kube-controller-manager"
SCHEDULER = "system:kube-scheduler"

# Everything but reads of the health endpoints; bodies are left out, and with them the secrets.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "omitManagedFields": True,
    "rules": [
        {"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*", "/openapi/*", "/version*"]},
        {"level": "None", "users": [CONTROLLER_MANAGER, SCHEDULER], "verbs": ["get", "list", "watch"]},
        {"level": "Metadata"},
    ],
}


class ControlPlaneError(Exception):
    """The control plane does not start; the message says where the logs are."""


class Process:
    """A program of ours, its log and its end.

    Args:
        name: of the program, and of its log.
        command: its words.
        folder: where the log is.
        environment: variables; none means this process's.
    """

    def __init__(
        self, name: str, command: list[str], folder: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.command, self.log, self.environment = name, command, folder / f"{name}.log", environment
        self.handle: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.log, "ab") as log:
            # A session of its own, so that Ctrl-C reaches us alone and the order of stopping stays ours.
            self.handle = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready()`, or raise with the end of the log."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ready():
            gone = self.handle is None or self.handle.poll() is not None
            if gone or time.monotonic() > deadline:
                end = self.log.read_text(errors="replace")[-3000:]
                how = "has ended" if gone else f"is not ready after {PATIENCE_SECONDS} s"
                raise ControlPlaneError(f"{self.name} {how} ({what}). Its log is {self.log}:\n{end}")
            time.sleep(0.1)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.handle is None:
            return
        if self.handle.poll() is None:
            self.handle.send_signal(how)
            try:
                self.handle.wait(20)
            except subprocess.TimeoutExpired:
                self.handle.kill()
                self.handle.wait()
        self.handle = None


class ControlPlane:
    """One control plane and its files.

    Args:
        folder: an existing one for all files.
        say: takes lines of progress.
        address: of this machine, where nodes and pods shall reach the API server, too; nodes are then watched for
            their heartbeat. Without it the API server is reached on loopback only.

    Attributes:
        folder: logs, etcd's data, keys, kubeconfig.
        kubeconfig: of a member of system:masters.
        url: of the API server.
        token: the administrator's bearer token.
        audit_log: JSON lines, one a request, in the order of their ends.
        paths: of the binaries, by name.
    """

    def __init__(self, folder: Path, say: Say = say_on_stderr, *, address: str | None = None) -> None:
        self.address = address
        self.paths = binaries(CONTROL_PLANE, say)
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.audit_log = folder / "audit.log"
        self.tokens = {user: secrets.token_hex(16) for user in (ADMIN, CONTROLLER_MANAGER, SCHEDULER)}
        self.token = self.tokens[ADMIN]
        self._etcd_port, self._peer_port, self.port = free_ports(3)
        self.url = f"https://{address or '127.0.0.1'}:{self.port}"
        self.ca = folder / "certificates" / "apiserver.crt"
        self._processes: list[Process] = []

    def start(self) -> None:
        """Start everything and return when it is ready.

        Raises:
            ControlPlaneError: with the end of the log of what did not start.
        """
        self._write_files()
        etcd, api_server = self._process("etcd", self._etcd()), self._process("kube-apiserver", self._api_server())
        try:
            etcd.start()
            etcd.until(lambda: _answers(f"http://127.0.0.1:{self._etcd_port}/health"), "/health")
            api_server.start()
            api_server.until(self.ready, "/readyz")
            for process in (
                self._process("kube-controller-manager", self._controller_manager()),
                self._process("kube-scheduler", self._scheduler()),
            ):
                process.start()
            # Pods need their namespace's ServiceAccount, which is the controller manager's first sign of life.
            path = "/api/v1/namespaces/default/serviceaccounts/default"
            self._processes[2].until(lambda: self._get(path) is not None, path)
        except BaseException:
            self.stop()
            raise

    def ready(self) -> bool:
        """Whether the API server says so."""
        return self._get("/readyz") is not None

    def stop(self) -> None:
        """Stop everything, last started first."""
        while self._processes:
            self._processes.pop().stop()

    def restart_api_server(self, *, how: signal.Signals = signal.SIGTERM, away_seconds: float = 0) -> None:
        """Stop the API server, leave it away for a while, start it on the same port and wait until it is ready."""
        (api_server,) = (process for process in self._processes if process.name == "kube-apiserver")
        api_server.stop(how)
        time.sleep(away_seconds)
        api_server.start()
        api_server.until(self.ready, "/readyz")

    def write_kubeconfig(
        self, path: Path, token: str, *, url: str | None = None, namespace: str = "default", ca: Path | None = None
    ) -> Path:
        """Write a kubeconfig for a token, and for a proxy's address and authority where they are given."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": url or self.url, "certificate-authority": str(ca or self.ca)}}
            ],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def audit(self, since: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the requests in the audit log from a position on, and the position of its end."""
        with open(self.audit_log, "rb") as file:
            file.seek(since)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        return [json.loads(line) for line in whole.splitlines()], since + len(whole)

    def _process(self, name: str, flags: list[str]) -> Process:
        process = Process(name, [str(self.paths[name]), *flags], self.folder)
        self._processes.append(process)
        return process

    def _etcd(self) -> list[str]:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _api_server(self) -> list[str]:
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--cert-dir={self.ca.parent}",
            *self._addresses(),
            f"--secure-port={self.port}",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-key-file={self.folder / 'service-accounts.key'}",
            f"--service-account-signing-key-file={self.folder / 'service-accounts.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            # Some distributions turn it on; then an owner reference that blocks deletion needs a permission of its own.
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
            f"--audit-policy-file={self.folder / 'audit-policy.yaml'}",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-maxsize=2000",
            "--shutdown-delay-duration=0s",
        ]

    def _addresses(self) -> list[str]:
        if self.address is None:
            return ["--bind-address=127.0.0.1"]
        # Loopback cannot be advertised, and `kubectl logs` would look a node up by its name, which nobody knows.
        return [
            "--bind-address=0.0.0.0",
            f"--advertise-address={self.address}",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def _controller_manager(self) -> list[str]:
        return [
            f"--kubeconfig={self.folder / 'controller-manager.kubeconfig'}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--service-account-private-key-file={self.folder / 'service-accounts.key'}",
            f"--root-ca-file={self.ca}",
            "--use-service-account-credentials=true",
            # Played nodes send no heartbeat; tests that want a node to fail say so themselves.
            f"--controllers=*,-nodeipam{'' if self.address else ',-node-lifecycle-controller'}",
            "--kube-api-qps=400",
            "--kube-api-burst=800",
            "--concurrent-namespace-syncs=10",
        ]

    def _scheduler(self) -> list[str]:
        return [f"--config={self.folder / 'scheduler.yaml'}", "--secure-port=0"]

    def _write_files(self) -> None:
        self.ca.parent.mkdir(parents=True, exist_ok=True)
        _make_key(self.folder / "service-accounts.key")
        groups = {ADMIN: "system:masters"}
        lines = [f'{token},{user},{user},"{groups.get(user, "")}"' for user, token in self.tokens.items()]
        tokens = self.folder / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text("\n".join(lines) + "\n")
        (self.folder / "audit-policy.yaml").write_text(yaml.safe_dump(AUDIT_POLICY))
        self.write_kubeconfig(self.kubeconfig, self.token)
        self.write_kubeconfig(self.folder / "controller-manager.kubeconfig", self.tokens[CONTROLLER_MANAGER])
        scheduler = self.write_kubeconfig(self.folder / "scheduler.kubeconfig", self.tokens[SCHEDULER])
        configuration = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(scheduler), "qps": 400, "burst": 800},
            "leaderElection": {"leaderElect": False},
            "percentageOfNodesToScore": 100,
            "podMaxBackoffSeconds": 2,
        }
        (self.folder / "scheduler.yaml").write_text(yaml.safe_dump(configuration))

    def _get(self, path: str) -> Any:
        if not self.ca.exists():
            return None
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                return answer.read()
        except (OSError, ssl.SSLError):
            return None


@contextlib.contextmanager
def control_plane(*, keep: Callable[[], bool] = lambda: False, say: Say = say_on_stderr) -> Iterator[ControlPlane]:
    """A control plane in a temporary folder that is removed at the end, unless `keep()`."""
    folder = Path(tempfile.mkdtemp(prefix="populora-cluster-"))
    plane = ControlPlane(folder, say)
    try:
        plane.start()
        yield plane
    except ControlPlaneError:
        say(f"Logs of the control plane are kept in {folder}")
        raise
    else:
        if keep():
            say(f"Logs of the control plane are kept in {folder}")
    finally:
        plane.stop()
        if sys.exc_info()[0] is None and not keep():
            shutil.rmtree(folder, ignore_errors=True)


def _make_key(path: Path) -> None:
    if shutil.which("openssl") is None:
        raise ControlPlaneError("The key that signs service accounts is made with openssl: install openssl")
    subprocess.run(["openssl", "genrsa", "-out", str(path), "2048"], check=True, capture_output=True)


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In a child: end with the thread that has started it, also where that is killed and can stop nothing."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for taken in sockets:
            taken.bind(("127.0.0.1", 0))
        return [int(taken.getsockname()[1]) for taken in sockets]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> None:
    """Start a control plane, print its kubeconfig, and stop it on Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description="A Kubernetes control plane on loopback.")
    parser.add_argument("--crd", action="store_true", help="install the definition of PopulationRun")
    parser.add_argument("--node", action="store_true", help="register a node whose pods are played")
    options = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        with control_plane() as plane, contextlib.ExitStack() as played:
            from client import Api

            api = Api(plane.url, plane.token, plane.ca)
            if options.crd:
                api.install_definition()
            if options.node:
                from kubelet import Kubelet

                played.enter_context(Kubelet(api))
            print(plane.kubeconfig, flush=True)
            say_on_stderr(f"kubectl is {plane.paths['kubectl']}; logs are in {plane.folder}; Ctrl-C stops")
            stop.wait()
    except (BuildError, ControlPlaneError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
