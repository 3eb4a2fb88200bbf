"""Sets of values that the tests render. Imported by name."""

from chart import Object

EVERYTHING: Object = {
    "fullnameOverride": "controller",
    "replicas": 3,
    "image": {"repository": "mirror/populora/controller", "digest": "sha256:" + "0" * 64, "pullSecrets": ["a", "b"]},
    "controller": {
        "namespaces": ["team-a", "team-b"],
        "leaseName": "leader",
        "leaseNamespace": "leases",
        "leaseSeconds": 30,
        "workers": 16,
        "resyncSeconds": 300,
        "statusPollSeconds": 2.5,
        "metricsPort": 9080,
        "healthPort": 9081,
        "logFormat": "text",
        "logLevel": "debug",
        "extraArgs": ["--identity=me and 'you'"],
        "extraEnv": {"HTTPS_PROXY": "http://proxy:3128"},
    },
    "workloads": {
        "trainerImage": "mirror/trainer:1",
        "sandboxImage": "mirror/sandbox:1",
        "sidecarImage": "mirror/sidecar:1",
        "servingImage": "mirror/vllm:1",
        "imagePullPolicy": "Always",
        "imagePullSecrets": ["c", "d"],
    },
    "serviceAccount": {"name": "robot", "annotations": {"identity": "role"}},
    "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}},
    "securityContext": {"runAsUser": 1000, "runAsGroup": 1000},
    "podLabels": {"team": "ml", "app.kubernetes.io/component": "mine"},
    "podAnnotations": {"note": "yes: #1"},
    "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "infra", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
            }
        }
    },
    "topologySpread": {"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"},
    "podDisruptionBudget": {"maxUnavailable": 2},
    "networkPolicy": {
        "metricsFrom": [
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
                "podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]},
            },
            {"ipBlock": {"cidr": "10.0.0.0/8"}},
        ],
        "apiServerCIDRs": ["10.1.2.3/32"],
        "apiServerPorts": [6443],
    },
    "monitoring": {
        "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
        "podMonitor": {"enabled": True, "interval": "1m", "labels": {"release": "prometheus"}},
        "prometheusRule": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "alertLabels": {"team": "ml"},
            "runbookUrl": "https://runbooks.example/populora",
            "stalledAfter": "90m",
        },
        "dashboards": {"enabled": True, "labels": {"grafana_dashboard": "1"}, "annotations": {"grafana_folder": "ML"}},
    },
}

NOTHING: Object = {
    "replicas": 0,
    "crds": {"install": False},
    "serviceAccount": {"create": False, "name": "robot"},
    "rbac": {"create": False, "aggregate": False},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "resources": {"requests": None, "limits": None},
    "securityContext": {"runAsUser": None, "runAsGroup": None},
}

MATRIX: dict[str, Object] = {
    "defaults": {},
    "everything": EVERYTHING,
    "nothing": NOTHING,
    "one-namespace": {"controller": {"namespaces": ["team-a"]}},
    "existing-account": {"serviceAccount": {"create": False, "name": "robot"}},
    "crd-goes": {"crds": {"keep": False}},
    "service-monitor": {"monitoring": {"serviceMonitor": {"enabled": True}}},
    "pod-monitor": {"monitoring": {"podMonitor": {"enabled": True}}},
    "rules": {"monitoring": {"prometheusRule": {"enabled": True}}},
    "dashboards": {"monitoring": {"dashboards": {"enabled": True}}},
    "openshift": {"securityContext": {"runAsUser": None, "runAsGroup": None}},
    "tag": {"image": {"tag": "1.2.3-rc.1", "pullPolicy": "Always"}},
}
