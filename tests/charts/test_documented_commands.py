"""What the documentation tells people to type does what it says, on a real API server."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from chart import ROOT, Helm
from client import Api, ApiError, eventually
from control_plane import ControlPlane
from kubelet import Kubelet
from population_run import Run, read_manifest
from release import Released, controller_process

pytestmark = pytest.mark.slow


def blocks(page: str, heading: str = "") -> list[str]:
    """Return the shell blocks of a page, or of one of its sections."""
    text = (ROOT / "docs" / page).read_text()
    if heading:
        level, _ = heading.split(" ", 1)
        text = re.split(rf"^#{{1,{len(level)}}} ", text.split(f"{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^( *)```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return ["\n".join(line.removeprefix(indent) for line in body.splitlines()) for indent, body in found]


class Shell:
    """A shell of a person with helm, kubectl and a kubeconfig of their own."""

    def __init__(self, helm: Helm, plane: ControlPlane, folder: Path) -> None:
        tools = folder / "tools"
        tools.mkdir()
        for name, path in (("helm", helm.binary), ("kubectl", plane.paths["kubectl"])):
            (tools / name).symlink_to(path)
        kubeconfig = Path(shutil.copy(plane.kubeconfig, folder / "person.kubeconfig"))
        self.environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(folder),
            "KUBECONFIG": str(kubeconfig),
        }

    def __call__(self, commands: str) -> str:
        """Run commands in the repository's root; every one must succeed."""
        bash = ["bash", "-euo", "pipefail", "-c", commands]
        done = subprocess.run(bash, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def shell(cluster_helm: Helm, plane: ControlPlane, tmp_path: Path) -> Shell:
    return Shell(cluster_helm, plane, tmp_path)


def test_the_quickstart_leads_to_a_completed_run(
    shell: Shell, api: Api, plane: ControlPlane, namespaces: list[str], kubelet: Kubelet, tmp_path: Path
) -> None:
    install, prepare, start, wait, explain, results, away = blocks("quickstart-cluster.md")
    try:
        shell(install)
        with controller_process(api, plane, "populora-system", tmp_path):
            shell(prepare)
            shell(start.replace(" --watch", ""))
            shell(wait)
            run = Run(api, "ml", "nano-s3")
            assert run.phase() == "Completed"
            assert run.status()["step"] == 30
            said = shell(explain)
            assert "StepsDone" in said
            assert results.startswith("populora status")
            shell(away)
            run.until_gone()
    finally:
        # Before its namespace, which holds the record of the release: cluster-wide objects would be left.
        shell("helm uninstall populora --namespace populora-system --ignore-not-found --wait")
        for name in ("ml", "populora-system"):
            api.delete("Namespace", name)
            eventually(lambda name=name: api.find("Namespace", name) is None, f"{name} is gone")


def test_a_run_is_watched_suspended_and_resumed_as_written(
    shell: Shell,
    cluster_helm: Helm,
    api: Api,
    plane: ControlPlane,
    namespaces: list[str],
    kubelet: Kubelet,
    tmp_path: Path,
) -> None:
    home, team, _ = namespaces
    released = Released(cluster_helm, api, plane, home, {}, tmp_path)
    shell(f"kubectl config set-context --current --namespace {team}")
    eventually(lambda: api.list("PopulationRun", None) is not None, "PopulationRuns are served", ignore=ApiError)
    kubelet.training("nano-4x4", team).limit = 3
    with released.running():
        run = Run.create(api, team, read_manifest("nano-4x4"))
        run.until_step(3)
        look, describe, _, logs = blocks("operations.md", "## The life of a run")[0].splitlines()
        assert "Running" in shell(look)
        assert "TrainersReady" in shell(describe.replace("NAME", run.name))
        assert logs.startswith("kubectl logs")

        suspend, resume = blocks("operations.md", "### Suspend and resume")[0].replace("NAME", run.name).splitlines()
        shell(suspend)
        run.until("Suspended")
        assert run.pods() == []
        shell(resume)
        run.until("Running")
        assert kubelet.training(run.name, team).first_steps == [0, 3]

        (holder,) = blocks("operations.md", "## Fail-over")
        assert shell(holder.replace("populora-system", home)).strip()


def test_a_run_that_stays_in_deletion_is_let_go_as_written(
    shell: Shell,
    cluster_helm: Helm,
    api: Api,
    plane: ControlPlane,
    namespaces: list[str],
    kubelet: Kubelet,
    tmp_path: Path,
) -> None:
    home, team, _ = namespaces
    released = Released(cluster_helm, api, plane, home, {}, tmp_path)
    shell(f"kubectl config set-context --current --namespace {team}")
    eventually(lambda: api.list("PopulationRun", None) is not None, "PopulationRuns are served", ignore=ApiError)
    stuck, by_hand, left = (
        block.replace("NAME", "nano-s3") for block in blocks("operations.md", "## Clean up by hand")
    )
    finalizers, why, keep = stuck.splitlines()
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    api.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "populora-s3"}, "stringData": keys}, team)
    kubelet.hold("cleanup")
    with released.running():
        run = Run.create(api, team, read_manifest("nano-s3"), deletionPolicy="Delete", training={"steps": 3})
        run.until("Completed")
        assert "populora.dev/cleanup" in shell(finalizers)
        run.delete()
        run.until_event("CleanupStarted")
        assert "CleanupStarted" in shell(why)
        assert not run.gone()
        shell(keep)
        run.until_gone()

        run = Run.create(api, team, read_manifest("nano-s3"), deletionPolicy="Delete", training={"steps": 3})
        run.until("Completed")
    run.delete()
    assert not run.gone()
    shell(by_hand)
    run.until_gone()
    eventually(lambda: "populora.dev" not in shell(left) and not shell(left).strip(), "nothing is left")
