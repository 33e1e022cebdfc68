"""``deploy/slurm`` on real daemons: `make test-slurm`. The file's name keeps it out of `make test`.

Every job must end with the bits of an undisturbed one, iterators included.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from slurm_cluster import HOLDS_TO_MEMORY, NODES, SlurmCluster

pytestmark = pytest.mark.timeout(1800)

TEMPLATE = ROOT / "deploy/slurm/train.sbatch"
TRAINER = ROOT / "tests/deploy/slurm/trainer_with_digests.py"
PROCESSES = 4
STEPS = 40
LOCAL_EVERY = 5
PERSISTENT_EVERY = 15
PROGRAM = """
echo "task $SLURM_PROCID begins by script ${SLURM_RESTART_COUNT:-0}"
sleep "$1"
"""
"""Takes the arguments of the trainer behind its own, and saves nothing."""
RAM_PROGRAM = ROOT / "tests/deploy/slurm/ram_program.py"
SLOT_MIB = 28
"""Two of a process take most of a node's ramdisk."""
MEMORY_MIB = 130
"""Room for the program and its slots once, and not twice."""


class Job:
    """A folder as a user makes it, and the job submitted from there."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self._cluster = cluster
        self.folder = folder
        self.job_id = ""
        folder.mkdir()
        secret = folder / "secret"
        secret.write_text("9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f")
        secret.chmod(0o600)

    def submit(
        self,
        *options: str,
        pause_s: float = 0.0,
        width: int = 1024,
        nodes: int = 4,
        tasks_per_node: int = 1,
        gpus: int = 0,
        crash: str = "0:0",
        program: Sequence[str] = (),
        path: Path = Path(sys.executable).parent,
    ) -> Job:
        """Submit the template with its lines changed.

        Args:
          program: another one than the trainer.
          path: where programs are looked for first.
        """
        program = program or [
            *(
                sys.executable,
                str(TRAINER),
                f"--slices={nodes * tasks_per_node // 2}",
                f"--steps={STEPS}",
            ),
            *(f"--local-every={LOCAL_EVERY}", f"--persistent-every={PERSISTENT_EVERY}"),
            *(f"--pause-s={pause_s}", f"--width={width}"),
        ]
        changes = {
            "change 1": f"#SBATCH --nodes={nodes}-{nodes + 1}",
            "change 3": f"nodes={nodes}",
            "change 4": f"tasks_per_node={tasks_per_node}",
            "change 5": f"train=({shlex.join(program)})",
        }
        if gpus:
            changes["change 2"] = f"#SBATCH --gres=gpu:{gpus}"
        lines = TEMPLATE.read_text().splitlines()
        for index, line in enumerate(lines):
            for mark, change in changes.items():
                if f"# {mark}:" in line:
                    lines[index] = change
        (self.folder / "train.sbatch").write_text("\n".join(lines) + "\n")
        env = {
            "PATH": f"{path}:{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",
            "TEST_CRASH": crash,
        }
        name = f"--job-name={self.folder.name}"
        self.job_id = self._cluster.submit(self.folder, env, name, *options)
        return self

    @property
    def log(self) -> str:
        path = self.folder / f"train-{self.job_id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, pattern: str) -> None:
        self._cluster.wait_for(
            lambda: re.search(pattern, self.log) is not None,
            f"{pattern!r} in the log", lambda: self.log[-8000:],
        )  # fmt: skip

    def wait_for_end(self) -> str:
        """Return the state in which the job ended."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

        def state() -> str:
            return self._cluster.job(self.job_id)["JobState"]

        self._cluster.wait_for(
            lambda: state() in ends, "the job's end", lambda: f"{state()}\n{self.log[-8000:]}"
        )
        return state()

    def starts(self) -> list[int | None]:
        """Return the step after which each life of the job went on, the same on all processes."""
        lines = re.findall(r"process (\d): start after step (\w+)", self.log)
        lives = [lines[at : at + PROCESSES] for at in range(0, len(lines), PROCESSES)]
        for life in lives:
            assert {process for process, _ in life} == {"0", "1", "2", "3"}, lines
            assert len({step for _, step in life}) == 1, lines
        return [None if life[0][1] == "None" else int(life[0][1]) for life in lives]

    def newest_in_ram(self) -> int:
        return max(map(int, re.findall(r"saved step (\d+) to RAM", self.log)))

    def drained(self) -> int:
        """Return the step that a drain wrote, with the markers of both parts."""
        (step,) = re.findall(r"drained step (\d+) to ", self.log)
        for marker in (f"{step}/_CHECKPOINT_METADATA", f"host_state/{step}/marker.json"):
            assert (self.folder / "checkpoints" / marker).is_file(), self.log
        return int(step)

    def digests(self) -> list[dict[str, Any]]:
        return [
            json.loads((self.folder / f"digests-{process}.json").read_text())
            for process in range(PROCESSES)
        ]

    def nodes_of_lives(self) -> list[list[str]]:
        return [line.split() for line in re.findall(r"life \d+ on (.*)", self.log)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    slurm = SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster")
    yield slurm
    slurm.close()


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(cluster, tmp_path_factory.mktemp("slurm") / "undisturbed").submit()
    assert job.wait_for_end() == "COMPLETED", job.log
    assert job.starts() == [None]
    return job


@pytest.fixture
def job(cluster: SlurmCluster, undisturbed: Job, tmp_path: Path) -> Iterator[Job]:
    """A job that starts after the undisturbed one, on five idle nodes."""
    del undisturbed
    cluster.wait_until_idle()
    job = Job(cluster, tmp_path / tmp_path.name)
    yield job
    cluster.cancel(job.job_id)


def test_slurm_success_leaves_no_ram(cluster: SlurmCluster, undisturbed: Job) -> None:
    lines = re.findall(r"^\S+ +[\d.]+ MiB .* removed: .+$", undisturbed.log, re.M)
    assert len(lines) == PROCESSES
    for name in undisturbed.nodes_of_lives()[0]:
        assert not [path for path in cluster.ram(name).glob("eckpt/*") if path.is_dir()]


def test_slurm_task_killed_restarts_on_same_nodes(
    cluster: SlurmCluster, undisturbed: Job, job: Job
) -> None:
    job.submit(pause_s=0.5)
    job.wait_for(r"saved step 10 to RAM")
    (pid,) = cluster.pids_on("n1", TRAINER.name)
    newest = job.newest_in_ram()
    os.kill(pid, signal.SIGKILL)
    cluster.wipe("n1")
    assert job.wait_for_end() == "COMPLETED", job.log
    assert job.nodes_of_lives() == [["n0", "n1", "n2", "n3"]] * 2
    _check_resumed(job, undisturbed, newest)


def test_slurm_two_tasks_a_node_restart_from_ram(
    cluster: SlurmCluster, undisturbed: Job, job: Job
) -> None:
    """Each slice has a node, with a task for each of its GPUs."""
    job.submit(pause_s=0.5, nodes=2, tasks_per_node=2, gpus=2)
    job.wait_for(r"saved step 10 to RAM")
    newest = job.newest_in_ram()
    os.kill(cluster.pids_on("n1", TRAINER.name)[0], signal.SIGKILL)
    cluster.wipe("n1")
    assert job.wait_for_end() == "COMPLETED", job.log
    assert job.nodes_of_lives() == [["n0", "n1"]] * 2
    _check_resumed(job, undisturbed, newest)


def test_slurm_task_alone_on_a_node_takes_all_gpus(undisturbed: Job, job: Job) -> None:
    job.submit(gpus=2)
    assert job.wait_for_end() == "COMPLETED", job.log
    assert job.log.count("takes GPUs 0,1") == PROCESSES
    assert job.digests() == undisturbed.digests()


@pytest.mark.skipif(not HOLDS_TO_MEMORY, reason="jobs are not held to their memory here")
def test_slurm_memory_of_a_dead_life_is_reused(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Its pages count in the job: there is no room for as many again, and no need."""
    job = _reserve_in_memory(cluster, tmp_path, MEMORY_MIB)
    assert job.wait_for_end() in ("COMPLETED", "OUT_OF_MEMORY"), job.log
    assert re.search(": finished$", job.log, re.M), job.log
    found = re.findall(r"process \d: found (\d) slots, (\d+) MiB", job.log)
    assert [slots for slots, _ in found].count("2") == PROCESSES, job.log
    assert all(int(mib) + 2 * SLOT_MIB > MEMORY_MIB for _, mib in found), job.log
    assert len(job.nodes_of_lives()) == 2
    assert "Out Of Memory" not in job.log


@pytest.mark.skipif(not HOLDS_TO_MEMORY, reason="jobs are not held to their memory here")
def test_slurm_memory_limit_is_named_before_a_kill(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = _reserve_in_memory(cluster, tmp_path, 2 * SLOT_MIB + 14)
    assert job.wait_for_end() in ("FAILED", "OUT_OF_MEMORY"), job.log
    assert re.search(r"MemoryLimitReached: .*the memory limit of cgroup .* are left for", job.log)
    assert "Out Of Memory" not in job.log
    assert "given up because 3 lives in a row" in job.log


def _reserve_in_memory(cluster: SlurmCluster, folder: Path, memory_mib: int) -> Job:
    """Submit a job that reserves slots in little memory.

    Slurm with cgroup v1 may call it OUT_OF_MEMORY: it takes a batch step that came to the limit
    for one that was killed, also where the kernel killed nothing.
    """
    cluster.wait_until_idle()
    for name in NODES:
        cluster.wipe(name)
    job = Job(cluster, folder / folder.name)
    program = [sys.executable, str(RAM_PROGRAM), str(SLOT_MIB)]
    return job.submit(f"--mem={memory_mib}", program=program, path=_programs(folder))


def _programs(folder: Path) -> Path:
    """Write a trainer that saves nothing and an ``eckpt`` that only says what it was asked for."""
    texts = {"eckpt": 'echo "$1 by script ${SLURM_RESTART_COUNT:-0}"', "program": PROGRAM}
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("moment", "task_s"),
    [
        pytest.param(r"life 0 on", 40, id="before_the_tasks"),
        pytest.param(r"task 0 begins", 60, id="while_they_run"),
        pytest.param(r"task 0 begins", 8, id="they_end_unnoticed"),
    ],
)
def test_slurm_lost_slurmd_leaves_one_script(
    cluster: SlurmCluster, tmp_path: Path, moment: str, task_s: int
) -> None:
    """The slurmd of the first node dies, and the batch script and the task there live on."""
    cluster.wait_until_idle()
    job = Job(cluster, tmp_path / tmp_path.name)
    programs = _programs(tmp_path)
    job.submit(program=[str(programs / "program"), str(task_s)], path=programs)
    job.wait_for(moment)
    cluster.lose_daemon("n0")
    assert job.wait_for_end() == "COMPLETED", job.log
    job.wait_for(rf"{job.job_id}\.0: (ends: the job was requeued|finished)")
    restarts = cluster.job(job.job_id)["Restarts"]
    cluster.lose_node("n0")
    cluster.start_node("n0")
    finished = re.findall(r"\.(\d): finished$", job.log, re.M)
    assert finished == [restarts], job.log
    # Until the requeue the old script may try again. Then it begins nothing, and leaves RAM alone.
    begun = re.findall(r"task 0 begins by script (\d)$", job.log, re.M)
    assert begun == sorted(begun), job.log
    assert begun.count(restarts) == 1, job.log
    assert set(re.findall(r"doctor by script (\d)$", job.log, re.M)) == {restarts}, job.log


def test_slurm_node_down_spare_takes_place(
    cluster: SlurmCluster, undisturbed: Job, job: Job
) -> None:
    job.submit(pause_s=0.5)
    job.wait_for(r"saved step 10 to RAM")
    newest = job.newest_in_ram()
    cluster.lose_node("n2")
    assert job.wait_for_end() == "COMPLETED", job.log
    cluster.start_node("n2")
    # Process 2 runs on n3 now, and process 3 on the spare.
    assert job.nodes_of_lives() == [["n0", "n1", "n2", "n3"], ["n0", "n1", "n3", "n4"]]
    assert cluster.job(job.job_id)["Restarts"] == "0"  # the same allocation had the spare
    _check_resumed(job, undisturbed, newest)


def test_slurm_too_few_nodes_job_is_requeued(
    cluster: SlurmCluster, undisturbed: Job, job: Job
) -> None:
    job.submit(pause_s=0.5)
    job.wait_for(r"saved step 10 to RAM")
    newest = job.newest_in_ram()
    for name in ("n3", "n4"):
        cluster.lose_node(name)
    job.wait_for(r"requeued: 3 of 4 nodes are up")
    for name in ("n3", "n4"):
        cluster.start_node(name)
    assert job.wait_for_end() == "COMPLETED", job.log
    assert cluster.job(job.job_id)["Restarts"] == "1"
    _check_resumed(job, undisturbed, newest)


def test_slurm_first_node_down_job_is_requeued(
    cluster: SlurmCluster, undisturbed: Job, job: Job
) -> None:
    job.submit(pause_s=0.5)
    job.wait_for(r"saved step 10 to RAM")
    newest = job.newest_in_ram()
    cluster.lose_node("n0")  # with the batch script
    assert job.wait_for_end() == "COMPLETED", job.log
    cluster.start_node("n0")
    assert cluster.job(job.job_id)["Restarts"] == "1"
    # Slurm may call a node that was lost before not responding for a while: then n4 has its place.
    first, second = job.nodes_of_lives()
    assert "n0" in first
    assert second == ["n1", "n2", "n3", "n4"]
    _check_resumed(job, undisturbed, newest)


def test_slurm_job_given_up_is_drained(cluster: SlurmCluster, undisturbed: Job, job: Job) -> None:
    job.submit(crash="99:12")
    assert job.wait_for_end() == "FAILED", job.log
    assert "given up because 3 lives in a row" in job.log
    assert job.starts() == [None, 10, 10], job.log
    assert job.drained() == 10
    assert cluster.job(job.job_id)["Restarts"] == "0"
    _check_continues_without_ram(cluster, undisturbed, job, 10)


def test_slurm_drain_does_without_a_lost_node(
    cluster: SlurmCluster, undisturbed: Job, job: Job
) -> None:
    job.submit(pause_s=0.5, crash="2:12")
    job.wait_for(r"(?s)life 2 .*saved step 20 to RAM")  # storage has 15
    newest = job.newest_in_ram()
    cluster.lose_node("n2")
    assert job.wait_for_end() == "FAILED", job.log
    cluster.start_node("n2")
    assert job.drained() in (newest, newest + LOCAL_EVERY)
    _check_continues_without_ram(cluster, undisturbed, job, job.drained())


def test_slurm_failed_drain_is_said(cluster: SlurmCluster, job: Job) -> None:
    job.submit(crash="99:12")
    job.wait_for("life 2")
    (job.folder / "checkpoints").rename(job.folder / "kept")
    (job.folder / "checkpoints").write_text("no directory")
    assert job.wait_for_end() == "FAILED", job.log
    assert "not drained: what only RAM has is still there" in job.log
    assert cluster.job(job.job_id)["ExitCode"] == "1:0"


def test_slurm_notice_by_scancel_resumes_at_step(
    cluster: SlurmCluster, undisturbed: Job, job: Job
) -> None:
    job.submit(pause_s=0.5)
    job.wait_for(r"process 0: step 11")
    cluster.send_notice(job.job_id)
    assert job.wait_for_end() == "COMPLETED", job.log
    _check_resumed_at_notices(job, undisturbed, cluster)


def test_slurm_time_limit_resumes_at_step(
    cluster: SlurmCluster, undisturbed: Job, job: Job
) -> None:
    job.submit("--time=2", "--signal=TERM@60", pause_s=1.5)
    job.wait_for(r"requeued: saved after a notice")
    # The rest fits into what is left, or else there are more notices of the same kind.
    assert job.wait_for_end() == "COMPLETED", job.log
    _check_resumed_at_notices(job, undisturbed, cluster)


def test_slurm_ramdisk_too_small_is_named(cluster: SlurmCluster, job: Job) -> None:
    cluster.lose_node("n1")
    cluster.wait_for(lambda: "down" in cluster.states()["n1"], "n1 to be down")
    cluster.start_node("n1", ram="1m")
    cluster.wait_until_idle()
    job.submit(width=1 << 20)
    assert job.wait_for_end() == "FAILED", job.log
    cluster.lose_node("n1")
    cluster.start_node("n1")
    assert "RamdiskFull" in job.log
    # The template's own limit: no endless loop for what no restart mends.
    assert "given up because 3 lives in a row" in job.log
    assert len(job.nodes_of_lives()) == 3


def test_slurm_secret_missing_is_named(job: Job) -> None:
    (job.folder / "secret").unlink()
    job.submit()
    assert job.wait_for_end() == "FAILED", job.log
    assert re.search(r"ConfigError: .*/secret cannot be read", job.log), job.log


def test_slurm_fewer_nodes_is_named(cluster: SlurmCluster, job: Job) -> None:
    job.submit(pause_s=0.5)
    job.wait_for(r"saved step 10 to RAM")
    cluster.cancel(job.job_id)
    cluster.wait_until_idle()
    job.submit(nodes=2)
    assert job.wait_for_end() == "FAILED", job.log
    assert "HostStateError" in job.log


def _check_resumed(job: Job, undisturbed: Job, newest: int) -> None:
    """The job went on once, at the newest whole step, and ended with the undisturbed bits."""
    starts = job.starts()
    assert starts[0] is None
    (resumed,) = starts[1:]
    # One more save may have become whole between the look at the log and the fault.
    assert resumed in (newest, newest + LOCAL_EVERY), job.log
    assert job.digests() == undisturbed.digests()


def _check_continues_without_ram(
    cluster: SlurmCluster, undisturbed: Job, job: Job, step: int
) -> None:
    """A job of the same name goes on at what storage has, and ends with the undisturbed bits."""
    cluster.wait_until_idle()
    for name in NODES:
        cluster.wipe(name)
    job.submit()
    assert job.wait_for_end() == "COMPLETED", job.log
    assert job.starts() == [step]
    assert job.digests() == undisturbed.digests()


def _check_resumed_at_notices(job: Job, undisturbed: Job, cluster: SlurmCluster) -> None:
    acted = [int(n) for n in re.findall(r"preemption notice: acted on at step (\d+)", job.log)]
    assert acted
    # A notice of the last save ends nothing: the job had come to its end.
    if acted[-1] == STEPS and job.log.count("requeued: saved after a notice") < len(acted):
        acted.pop()
    assert job.starts() == [None, *acted]
    assert cluster.job(job.job_id)["Restarts"] == str(len(acted))
    assert job.digests() == undisturbed.digests()
