"""What the manifests of a job on GKE trust: no code from the bucket, no link of a job's user."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from kubernetes_rules import GKE, SOURCES, manifests_in, one, pod_specs, words
from looks import eckpt_here

OWNER = 12345
DOCKERFILE = Path(__file__).parents[2] / "deploy" / "Dockerfile"


def caches(text: str) -> set[str]:
    """The compilation caches of all containers."""
    return {
        variable["value"]
        for spec in pod_specs(manifests_in(text))
        for container in spec["containers"]
        for variable in container.get("env", [])
        if variable["name"] == "JAX_COMPILATION_CACHE_DIR"
    }


@pytest.mark.parametrize("source", SOURCES)
def test_compilation_cache_is_not_in_the_bucket(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever can write into it runs code in the trainers."""
    assert eckpt_here(*words(source)) == 0
    assert caches(capsys.readouterr().out) == {"/tmp/jax-cache"}


@pytest.mark.parametrize("source", SOURCES)
def test_privileged_container_runs_an_image_of_its_own_by_digest(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever builds the trainer's image, or moves a tag, runs nothing on the node."""
    assert eckpt_here(*words(source)) == 0
    images = [
        container["image"]
        for spec in pod_specs(manifests_in(capsys.readouterr().out))
        for container in [*spec.get("initContainers", []), *spec["containers"]]
        if container.get("securityContext", {}).get("privileged")
    ]
    (base,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text("utf-8"), re.MULTILINE)
    assert images == ([base] if source == "daemonset" else [])
    assert re.search(r"@sha256:[0-9a-f]{64}$", base)


@pytest.mark.skipif(os.geteuid() != 0, reason="the script runs as root")
@pytest.mark.parametrize("link", ["data", "data/eckpt"])
def test_mount_script_gives_away_nothing_behind_a_link(tmp_path: Path, link: str) -> None:
    """As a job's user may have left it for the next start of the DaemonSet."""
    programs, ramdisk, victim = tmp_path / "bin", tmp_path / "ramdisk", tmp_path / "victim"
    for directory in (programs, ramdisk, victim):
        directory.mkdir()
    for name in ("mount", "mountpoint"):
        (programs / name).write_text("#!/bin/sh\nexit 0\n")
        (programs / name).chmod(0o755)
    if link != "data":
        (ramdisk / "data").mkdir()
    (ramdisk / link).symlink_to(victim)
    daemon = one(manifests_in((GKE / "daemonset.yaml").read_text()), "DaemonSet")
    (mount,) = pod_specs([daemon])[0]["initContainers"]
    subprocess.run(
        mount["command"],
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "RAMDISK": str(ramdisk),
            "EVENTS": str(tmp_path / "events"),
            "SIZE_BYTES": "1048576",
            "OWNER": f"{OWNER}:{OWNER}",
        },
        check=True,
    )
    assert victim.stat().st_uid == 0
    if link != "data":
        assert (ramdisk / "data").stat().st_uid == OWNER
