"""A Slurm cluster of five nodes on this machine: real daemons, each node with RAM of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

NODES = ("n0", "n1", "n2", "n3", "n4")
DEADLINE_S = 300.0
RAM_SIZE = "64m"
_CONFIG = """
ClusterName=test
SlurmctldHost=n0
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=200
GresTypes=gpu
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
UnkillableStepTimeout=240
SlurmdTimeout=15
SlurmctldTimeout=60
MinJobAge=3600
InactiveLimit=0
{nodes}
PartitionName=all Nodes=n[0-4] Default=YES MaxTime=INFINITE State=UP
"""
# As on most sites: a job is held to its memory, and has little unless it asks for more.
_GROUPS = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
AllowedSwapSpace=0
"""
HOLDS_TO_MEMORY = bool(os.environ.get("TEST_SLURM_GROUPS"))
"""Jobs are held to their memory: ``enter.py`` could make a control group."""
# Each node has a host name and a /dev/shm of its own, as another machine would.
_NODE = 'mount -t tmpfs -o size="$2" ram /dev/shm && hostname "$1" && exec slurmd -D -N "$1"'


class SlurmCluster:
    """The daemons, and what may happen to their nodes. ``root``: a new directory."""

    def __init__(self, root: Path) -> None:
        """Start all daemons; return when all nodes are idle."""
        self._root = root
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._without_daemon: dict[str, str] = {}  # their mount namespaces
        root.mkdir()
        (root / "state").mkdir()
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={name} Port={17001 + index}"
            " CPUs=2 RealMemory=2000 Gres=gpu:2 State=UNKNOWN"
            for index, name in enumerate(NODES)
        )
        settings = Path("/etc/slurm")
        plugin = "task/cgroup" if HOLDS_TO_MEMORY else "task/none"
        text = _CONFIG.format(root=root, nodes=nodes, task_plugin=plugin)
        (settings / "slurm.conf").write_text(text)
        gpus = (f"Name=gpu File={device}\n" for device in ("/dev/null", "/dev/zero"))
        (settings / "gres.conf").write_text("".join(gpus))
        if HOLDS_TO_MEMORY:
            (settings / "cgroup.conf").write_text(_GROUPS)
        self._munged = _start_munge(root)
        controller = ["unshare", "--uts", "sh", "-c", "hostname n0 && exec slurmctld -D -i"]
        self._controller = subprocess.Popen(
            controller, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for name in NODES:
            self.start_node(name)
        self.wait_until_idle()

    def start_node(self, name: str, ram: str = RAM_SIZE) -> None:
        """Start a node, which has nothing in RAM."""
        (self._root / f"spool-{name}").mkdir(exist_ok=True)
        node = ["unshare", "--uts", "--mount", "sh", "-c", _NODE, "node", name, ram]
        self._nodes[name] = subprocess.Popen(
            node, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def lose_node(self, name: str) -> None:
        """End all that runs on a node, at once; its RAM is gone with it."""
        for pid in [*self.pids_on(name), self._nodes[name].pid]:
            _kill(pid)
        self._nodes.pop(name).wait()
        self._without_daemon.pop(name, None)

    def lose_daemon(self, name: str) -> None:
        """End a node's slurmd alone; what it has started lives on until the node is lost."""
        self._without_daemon[name] = os.readlink(f"/proc/{self._nodes[name].pid}/ns/mnt")
        _kill(self._nodes[name].pid)
        self._nodes[name].wait()

    def wipe(self, name: str) -> None:
        """Empty a node's RAM, as after an exchange of the machine behind a name."""
        for entry in self.ram(name).iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def ram(self, name: str) -> Path:
        """Return a node's /dev/shm."""
        return Path(f"/proc/{self._nodes[name].pid}/root/dev/shm")

    def pids_on(self, name: str, program: str = "") -> list[int]:
        """Return the processes in a node's mount namespace, but for its slurmd.

        Only those whose command line has ``program``, which is theirs and not of a shell.
        """
        daemon = self._nodes[name].pid
        place = self._without_daemon.get(name) or os.readlink(f"/proc/{daemon}/ns/mnt")
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == daemon:
                continue
            try:
                if os.readlink(entry / "ns/mnt") != place:
                    continue
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has ended meanwhile
                continue
            if not program or (b"python" in words[0] and program.encode() in words[1]):
                found.append(int(entry.name))
        return found

    def states(self) -> dict[str, str]:
        """Return each node's state as Slurm has it; empty while the controller is not there."""
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N %t"],
            check=False,
            capture_output=True,
            text=True,
        )
        return dict(line.split() for line in done.stdout.splitlines())  # type: ignore[misc]

    def submit(self, folder: Path, env: Mapping[str, str], *options: str) -> str:
        """Submit ``train.sbatch`` of a folder; return the job's id."""
        done = subprocess.run(
            ["sbatch", "--parsable", *options, "train.sbatch"],
            cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job_id],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)  # type: ignore[misc]

    def cancel(self, job_id: str) -> None:
        """End a job, if it has not ended."""
        subprocess.run(["scancel", job_id], check=True)

    def send_notice(self, job_id: str) -> None:
        """Send SIGTERM to a job's tasks."""
        subprocess.run(["scancel", "--signal=TERM", job_id], check=True)

    def wait_until_idle(self) -> None:
        """Return when all nodes are up and nothing runs."""
        self.wait_for(lambda: list(self.states().values()) == ["idle"] * 5, "idle nodes")

    def wait_for(
        self, condition: Callable[[], bool], what: str, describe: Callable[[], str] = str
    ) -> None:
        """Return when ``condition`` holds; an AssertionError with ``describe()`` after long."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, (
                f"waited {DEADLINE_S:g} s for {what}; {self.states()}\n{describe()}"
            )
            time.sleep(0.2)

    def close(self) -> None:
        """End all daemons and what they started."""
        for name in list(self._nodes):
            self.lose_node(name)
        self._controller.terminate()
        self._controller.wait()
        self._munged.terminate()
        self._munged.wait()


def _start_munge(root: Path) -> subprocess.Popen[bytes]:
    key = root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    Path("/run/munge").mkdir(exist_ok=True)
    daemon = subprocess.Popen(
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--log-file={root}/munged.log"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + DEADLINE_S
    while subprocess.call(
        ["munge", "--no-input"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ):
        assert time.monotonic() < deadline_s, "munged does not answer"
        assert daemon.poll() is None, (root / "munged.log").read_text()
        time.sleep(0.1)
    return daemon


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
