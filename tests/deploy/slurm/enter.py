"""Run a program where Slurm is installed: ``python enter.py PROGRAM...``, as root, on Debian.

Makes a mount, process and network namespace over an overlay of ``/``, installs Debian's packages
in it, and runs the program there. All of it ends with the program, and nothing is left behind: what
is written outside of the repository lies on a tmpfs that only the namespace has. Ends with 77, and
says why, where this cannot be done; else with the program's status.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NOT_POSSIBLE = 77
PACKAGES = (
    "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "iproute2",
)  # fmt: skip
NODES = 5
ROOT = Path("/mnt")
TOOLS = ("unshare", "mount", "chroot", "apt-get")
INSTALL_TIMEOUT_S = 600
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")


class NotPossible(Exception):
    """This machine or user cannot run the tests."""


def main(arguments: list[str]) -> int:
    """Run one of the three stages: outside, in the namespace, in the new root."""
    stages = {"--in-namespace": _in_namespace, "--in-root": _in_root}
    try:
        if arguments[0] in stages:
            return stages[arguments[0]](arguments[1:])
        _check_machine()
        return subprocess.call([*_UNSHARE, *_stage("--in-namespace"), *arguments])
    except NotPossible as problem:
        print(f"test-slurm: cannot run here: {problem}", file=sys.stderr)
        return NOT_POSSIBLE


def address(node: int) -> str:
    """Return the address of a node, on the namespace's own loopback device."""
    return f"10.77.0.{10 + node}"


def _stage(name: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), name]


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise NotPossible("it needs root, for namespaces and for Slurm's daemons")
    if not Path("/etc/debian_version").exists():
        raise NotPossible("it installs Debian's packages, and this is another distribution")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NotPossible(f"{', '.join(missing)} not found")
    probe = subprocess.run(
        [*_UNSHARE, "--net", "true"], check=False, capture_output=True, text=True
    )
    if probe.returncode != 0:
        raise NotPossible(f"no namespaces: {probe.stderr.strip()}")


def _in_namespace(program: list[str]) -> int:
    """Make the new root, which shows the machine's files and keeps none of their changes."""
    _require("mount", "-t", "tmpfs", "test-slurm", str(ROOT))
    for name in ("changes", "work", "root"):
        (ROOT / name).mkdir()
    root = ROOT / "root"
    layers = f"lowerdir=/,upperdir={ROOT}/changes,workdir={ROOT}/work"
    _require("mount", "-t", "overlay", "-o", layers, "overlay", str(root))
    _require("mount", "--rbind", "/dev", str(root / "dev"))
    _require("mount", "-t", "tmpfs", "shm", str(root / "dev/shm"))
    _require("mount", "-t", "proc", "proc", str(root / "proc"))
    _require("mount", "--rbind", "/sys", str(root / "sys"))
    # The overlay shows one file system, and none of the changes made to it from now on.
    for needed in (Path.cwd(), Path(sys.prefix), Path(sys.base_prefix)):
        place = root / needed.relative_to("/")
        place.mkdir(parents=True, exist_ok=True)
        _require("mount", "--rbind", str(needed), str(place))
    policy = root / "usr/sbin/policy-rc.d"  # no daemon is to start when it is installed
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    return subprocess.call(["chroot", str(root), "env", "-C", os.getcwd(), *_in_root_of(program)])


def _in_root_of(program: list[str]) -> list[str]:
    return [*_stage("--in-root"), *program]


def _in_root(program: list[str]) -> int:
    """Install, leave the machine's network, and run the program."""
    install = ["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *PACKAGES]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (install, ["apt-get", "update", "-qq"], install):
        done = subprocess.run(
            command,
            check=False,
            env=environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
        if done.returncode == 0 and command is install:
            break
    else:
        raise NotPossible(f"apt-get install: {(done.stderr or done.stdout).strip()[-500:]}")
    hosts = "".join(f"{address(node)} n{node}\n" for node in range(NODES))
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost {os.uname().nodename}\n{hosts}")
    up = ["ip link set lo up", *(f"ip address add {address(n)}/24 dev lo" for n in range(NODES))]
    shell = " && ".join([*up, 'exec "$@"'])
    return subprocess.call(["unshare", "--net", "sh", "-c", shell, "test-slurm", *program])


def _require(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise NotPossible(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
