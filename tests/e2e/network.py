"""The node's network: one bridge that pods are attached to, whose address is the node's. Imported by name."""

import json
import subprocess
from pathlib import Path

BRIDGE = "cni-t0"
ADDRESS = "10.244.0.1"
SUBNET = "10.244.0.0/24"
PLUGINS = "/usr/lib/cni"

_SETTINGS = {
    "net/ipv4/ip_forward": "1",
    # A pod's answer to another pod crosses the bridge only; so it passes the rules that put the Service's address back.
    "net/bridge/bridge-nf-call-iptables": "1",
}


def make_bridge() -> None:
    """Make the bridge in this process's network namespace; it lives before any pod, so servers can listen on it."""
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("address", "add", f"{ADDRESS}/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    for name, value in _SETTINGS.items():
        setting = Path("/proc/sys", name)
        if setting.exists():
            setting.write_text(value)


def write_plugin_configuration(folder: Path) -> Path:
    """Write the CNI configuration into a folder of its own and return that."""
    folder.mkdir()
    configuration = {
        "cniVersion": "0.4.0",
        "name": "populora-node",
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": SUBNET}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": str(folder.parent / "addresses"),
                },
            }
        ],
    }
    (folder / "10-populora.conflist").write_text(json.dumps(configuration, indent=2))
    return folder


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
