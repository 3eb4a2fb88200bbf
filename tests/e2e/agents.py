"""kubelet, kube-proxy and CoreDNS of the node. Imported by name."""

from pathlib import Path

import yaml
from build import binary
from control_plane import Process
from network import ADDRESS, SUBNET

NODE = "node1"
DOMAIN = "cluster.local"


def kubelet(folder: Path, kubeconfig: Path, socket: Path) -> Process:
    """Return the kubelet, not started.

    Args:
        folder: for its files; its name is that of the control group above all pods.
        kubeconfig: of an administrator.
        socket: of containerd.
    """
    endpoint = f"unix://{socket}"
    configuration = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{folder.name}",
        "clusterDNS": [ADDRESS],
        "clusterDomain": DOMAIN,
        "containerRuntimeEndpoint": endpoint,
        "imageServiceEndpoint": endpoint,
        "enforceNodeAllocatable": [],
        # A full disk of the machine is no concern of a test's pods.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "failCgroupV1": False,
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "5s",
        "podLogsDir": str(folder / "logs"),
        "resolvConf": "/dev/null",
        "serializeImagePulls": False,
    }
    path = folder / "kubelet.yaml"
    path.write_text(yaml.safe_dump(configuration))
    command = [
        str(binary("kubelet")),
        f"--config={path}",
        f"--kubeconfig={kubeconfig}",
        f"--root-dir={folder / 'kubelet'}",
        f"--hostname-override={NODE}",
        f"--node-ip={ADDRESS}",
    ]
    return Process("kubelet", command, folder)


def kube_proxy(folder: Path, kubeconfig: Path) -> Process:
    """Return kube-proxy, not started: Services by nftables."""
    configuration = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": SUBNET,
        "conntrack": {"maxPerCore": 0},
        "hostnameOverride": NODE,
        "mode": "nftables",
    }
    path = folder / "kube-proxy.yaml"
    path.write_text(yaml.safe_dump(configuration))
    return Process("kube-proxy", [str(binary("kube-proxy")), f"--config={path}"], folder)


def coredns(folder: Path, kubeconfig: Path) -> Process:
    """Return CoreDNS, not started: names of Services and pods at the bridge's address."""
    path = folder / "Corefile"
    path.write_text(
        f".:53 {{\n    bind {ADDRESS}\n    errors\n"
        f"    kubernetes {DOMAIN} in-addr.arpa {{\n        kubeconfig {kubeconfig}\n        ttl 1\n    }}\n}}\n"
    )
    return Process("coredns", [str(binary("coredns")), "-conf", str(path)], folder)
