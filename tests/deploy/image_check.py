"""deploy/Dockerfile, built by buildah and run as a pod runs it: ``make test-image``.

``BASE`` names the base image; by default it is the Dockerfile's. Where that cannot be pulled, it is
a Debian with Python, made by debootstrap: another base, but the same steps. Exit status 77 where
this machine or user cannot build an image; it needs some minutes and 5 GB of disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from launch_support import JobEnvironment, free_port

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
CANNOT = 77
PACKAGES = ("jax", "grain", "prometheus-client")  # as the image's, for a machine without a TPU
LOCK = ROOT / "deploy" / "image" / "packages.lock"
TRAINER, LAST_STEP = 1000, 100
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
BASE_PACKAGES = "ca-certificates,python3-dev,python3-pip,python3-venv"
# As a pod: a read-only root, one writable folder below it, the mounts, and the host's names.
ENTER = """
set -eu
root=$1 mounts=$2 user=$3; shift 3
mount --bind "$root" "$root"
mount --bind "$mounts" "$root/mnt"
mount --bind /etc/hosts "$root/etc/hosts"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -o remount,bind,ro "$root"
exec chroot --userspec="$user" "$root" /usr/bin/env -i "$@"
"""


class NotPossible(Exception):
    """This machine or user cannot build the image."""


@dataclasses.dataclass(frozen=True)
class Builder:
    """Buildah with a storage of its own, in a folder that goes afterwards."""

    scratch: Path

    def run(self, *arguments: str, timeout_s: float = 120) -> str:
        """Return what a command of buildah prints; CalledProcessError when it fails. Blocks."""
        storage = [f"--root={self.scratch / 'storage'}", f"--runroot={self.scratch / 'run'}"]
        command = ["buildah", *storage, "--storage-driver=vfs", *arguments]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True
        )
        return done.stdout.strip()

    def build(self, base: str) -> str:
        """Return the id of the image of deploy/Dockerfile on ``base``."""
        with packages_locked():
            self.run(
                *("build", "--format=docker", "--isolation=chroot", "--network=host"),
                *("--tag=trainer", f"--ignorefile={DOCKERFILE}.dockerignore"),
                *(f"--file={DOCKERFILE}", f"--build-arg=BASE={base}", str(ROOT)),
                timeout_s=1800,
            )
        return "localhost/trainer"

    @contextlib.contextmanager
    def mounted(self, image: str) -> Generator[Path]:
        """Yield the root of a new container of ``image``."""
        container = self.run("from", "--pull-never", image)
        try:
            yield Path(self.run("mount", container))
            self.run("umount", container)
        finally:
            self.run("rm", container)


@contextlib.contextmanager
def packages_locked() -> Generator[None]:
    """Have the lock of the image's packages in the source; one that is there stays."""
    if LOCK.exists():
        yield
        return
    try:
        # The Debian that stands in for the base has Python 3.11, which needs what 3.12 does.
        oldest = {**os.environ, "PYTHON_VERSION": "3.11"}
        subprocess.run([LOCK.with_name("lock.sh"), ROOT, LOCK, *PACKAGES], env=oldest, check=True)
        yield
    finally:
        LOCK.unlink(missing_ok=True)


def base_image(builder: Builder) -> str:
    """Return the image to build on: pulled, or made here."""
    (named,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text(), re.M)
    given = os.environ.get("BASE")
    wanted = given or f"docker.io/library/{named}"
    try:
        builder.run("pull", "--quiet", wanted, timeout_s=600)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        if given:
            raise NotPossible(f"{given} cannot be pulled: {error}") from error
        print(f"{wanted} cannot be pulled: a Debian with Python takes its place", flush=True)
        return debian_with_python(builder)
    return wanted


def debian_with_python(builder: Builder) -> str:
    """Return an image with what the Dockerfile needs of its base: python, pip and headers."""
    if shutil.which("debootstrap") is None:
        raise NotPossible("debootstrap is not installed, and the base cannot be pulled")
    root = builder.scratch / "debian"
    include = f"--include={BASE_PACKAGES}"
    subprocess.run(
        ["debootstrap", "--variant=minbase", include, "bookworm", root],
        stdout=subprocess.DEVNULL, timeout=900, check=True,
    )  # fmt: skip
    (root / "usr/bin/python").symlink_to("python3")
    for mark in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        mark.unlink()  # python's own images let pip install
    if CERTIFICATES.is_file():  # those that this machine trusts, for pip's downloads
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
        (root / "etc/pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}\n")
    container = builder.run("from", "scratch")
    inside = builder.run("mount", container)
    subprocess.run(["cp", "--archive", f"{root}/.", inside], timeout=300, check=True)
    shutil.rmtree(root)
    builder.run("umount", container)
    builder.run("commit", "--quiet", "--rm", container, "localhost/debian-python", timeout_s=600)
    return "localhost/debian-python"


@dataclasses.dataclass(frozen=True)
class Pod:
    """A container of the image: its root, its settings, and the host's folder at ``/mnt``."""

    root: Path
    settings: Mapping[str, Any]
    mounts: Path

    def run(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` as the image's user with the image's environment. Blocks."""
        pairs = [f"{name}={value}" for name, value in (environ or {}).items()]
        inside = [*self.settings["Env"], *pairs, *command]
        places = [str(self.root), str(self.mounts), self.settings["User"]]
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", ENTER, "enter", *places, *inside],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip


def check_settings(settings: Mapping[str, Any]) -> None:
    assert settings["User"] == f"{TRAINER}:{TRAINER}"
    assert "HOME=/tmp" in settings["Env"]
    assert settings["Healthcheck"]["Test"] == ["CMD", "eckpt", "doctor"]
    assert settings["Cmd"] == ["python", "/app/train.py"]


def check_tools(pod: Pod) -> None:
    who = pod.run(["id", "-u"])
    assert who.stdout.strip() == str(TRAINER), who.stderr
    for program in ("mount", "mountpoint", "setpriv"):
        assert pod.run(["sh", "-c", f"command -v {program}"]).returncode == 0, program
    written = pod.run(["touch", "/app/x"])
    assert "Read-only file system" in written.stderr, written
    found = pod.run(["sh", "-c", "command -v cc gcc g++ clang"])
    assert (found.returncode, found.stdout) == (127, ""), "a compiler is in the image"
    for folder in ("src", "wheels", "image"):
        left = [*(pod.root / folder).iterdir()] if (pod.root / folder).exists() else []
        assert not left, f"/{folder} of the build is in the image"
    health = pod.run(pod.settings["Healthcheck"]["Test"][1:])
    assert health.returncode == 0, health.stdout + health.stderr


def train(pod: Pod, address: str) -> list[str]:
    """Run the image's own command as the only process of a job; return the lines it prints."""
    place = JobEnvironment(address, 0, 1, 0, 1, 1, Path("/mnt/ramdisk"))
    environ = {
        **place.to_environ(),
        **place.jax_environ(),
        "ECKPT_DIR": "/mnt/storage",
        "ECKPT_RUN_ID": "image",
        "ECKPT_SECRET_FILE": "/mnt/secret",
        "ECKPT_BIND_HOST": "127.0.0.1",
        "ECKPT_PEER_PORT": "0",
        "ECKPT_PREEMPTION_GRACE_S": "20",
        "ECKPT_EVENT_LOG": "/mnt/ramdisk/events",
        "ECKPT_OBSERVERS": "event_log prometheus(0) hang(60)",
        "ECKPT_LOCAL_KEEP_LAST_N": "1",
        "ECKPT_PLACEMENT": "all_but_primary",
    }
    done = pod.run(pod.settings["Cmd"], environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def check_training(pod: Pod) -> None:
    """Three lives: a first one, one that has its RAM, and one that has storage alone."""
    for folder in ("ramdisk", "storage"):
        (pod.mounts / folder).mkdir(mode=0o700)
        os.chown(pod.mounts / folder, TRAINER, TRAINER)
    secret = pod.mounts / "secret"
    secret.write_text("9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f")
    secret.chmod(0o400)
    os.chown(secret, TRAINER, TRAINER)
    ends: list[str] = []
    for life, start in enumerate((None, LAST_STEP, LAST_STEP)):
        if life == 2:
            shutil.rmtree(pod.mounts / "ramdisk")
            (pod.mounts / "ramdisk").mkdir(mode=0o700)
            os.chown(pod.mounts / "ramdisk", TRAINER, TRAINER)
        # Not reserved: only a process of the same user could share it, and the pod's is another.
        first, *_, last = train(pod, f"127.0.0.1:{free_port()}")
        assert first == f"start after step {start}"
        ends.append(last)
    assert len(set(ends)) == 1, ends


def main() -> None:
    for program in ("buildah", "unshare"):
        if shutil.which(program) is None:
            raise NotPossible(f"{program} is not installed")
    if os.geteuid() != 0:
        raise NotPossible("it needs root, for mounts")
    with (
        tempfile.TemporaryDirectory(prefix="eckpt-image-") as scratch,
        tempfile.TemporaryDirectory(prefix="eckpt-image-", dir="/dev/shm") as mounts,
    ):
        Path(mounts).chmod(0o755)
        builder = Builder(Path(scratch))
        image = builder.build(base_image(builder))
        described = json.loads(builder.run("inspect", "--type=image", image))
        with builder.mounted(image) as root:
            (root / "etc/hosts").touch()
            pod = Pod(root, described["Docker"]["config"], Path(mounts))
            check_settings(pod.settings)
            check_tools(pod)
            check_training(pod)
            du = ["du", "--summarize", "--block-size=MB", "--one-file-system", root]
            size = subprocess.run(du, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    print(f"deploy/Dockerfile: built, checked and run ({size[0]})")


if __name__ == "__main__":
    try:
        main()
    except NotPossible as reason:
        print(f"test-image cannot run here: {reason}", file=sys.stderr)
        sys.exit(CANNOT)
