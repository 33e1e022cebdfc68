"""Run a program where Slurm is installed: ``python enter.py PROGRAM...``, as root, on Debian.

Makes a mount, process and network namespace over an overlay of ``/``, installs Debian's packages
in it, and runs the program there. All of it ends with the program, and nothing is left behind: what
is written outside of the repository lies on a tmpfs that only the namespace has. Ends with 77, and
says why, where this cannot be done; else with the program's status.

Where this process may make a memory control group of version 1, the program sees one of its own as
the only one, and ``GROUPS`` is set in its environment: Slurm then holds jobs to their memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

NOT_POSSIBLE = 77
PACKAGES = (
    "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "iproute2",
)  # fmt: skip
NODES = 5
GROUPS = "TEST_SLURM_GROUPS"
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
        with _memory_group() as group:
            enter = [*_UNSHARE, *(["--cgroup"] if group else []), *_stage("--in-namespace")]
            return subprocess.call([*enter, *arguments], env={**os.environ, GROUPS: group})
    except NotPossible as problem:
        print(f"test-slurm: cannot run here: {problem}", file=sys.stderr)
        return NOT_POSSIBLE


def address(node: int) -> str:
    """Return the address of a node, on the namespace's own loopback device."""
    return f"10.77.0.{10 + node}"


@contextlib.contextmanager
def _memory_group() -> Generator[str]:
    """Enter a new memory group, and remove it with all below it; yield its folder, or ""."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = [line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"]
    above = Path("/sys/fs/cgroup/memory", *(path.lstrip("/") for path in own))
    group = above / f"test-slurm-{os.getpid()}"
    try:
        if not own:
            raise FileNotFoundError("no memory group of version 1")
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        print(f"test-slurm: jobs are not held to their memory: {error}", file=sys.stderr)
        yield ""
        return
    try:
        yield str(group)
    finally:
        (above / "cgroup.procs").write_text(str(os.getpid()))
        for folder, _, _ in os.walk(group, topdown=False):
            os.rmdir(folder)


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
    if os.environ.get(GROUPS):
        groups = root / "sys/fs/cgroup"
        _require("mount", "-t", "tmpfs", "groups", str(groups))
        (groups / "memory").mkdir()
        _require("mount", "-t", "cgroup", "-o", "memory", "memory", str(groups / "memory"))
    # The overlay shows one file system, and none of the changes made to it from now on.
    for needed in (Path.cwd(), Path(sys.prefix), Path(sys.base_prefix)):
        place = root / needed.relative_to("/")
        place.mkdir(parents=True, exist_ok=True)
        _require("mount", "--rbind", str(needed), str(place))
    policy = root / "usr/sbin/policy-rc.d"  # no daemon is to start when it is installed
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    return _call_and_reap(["chroot", str(root), "env", "-C", os.getcwd(), *_in_root_of(program)])


def _call_and_reap(command: list[str]) -> int:
    """Run a program, and be the parent of what its processes leave behind, as init is.

    Slurm looks for the group of a killed task, and finds it as long as one of it is a zombie.
    """
    with subprocess.Popen(command) as process:
        while True:
            pid, status = os.wait()
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode


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
