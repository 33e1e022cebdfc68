"""The pods of the manifests, as processes: their own commands with their own environment."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes_rules import (
    Manifest,
    StartedContainer,
    edited,
    manifests_in,
    one,
    pod_specs,
    started,
    started_trainers,
    without_rights,
    words,
)
from launch_support import ReservedPort
from ledgers import complete_in
from looks import eckpt_here

ROOT = Path(__file__).parents[2]
GKE = ROOT / "deploy" / "gke"
LONG_S = 240.0
NEVER = 1_000_000
SLICES = 2
pytestmark = pytest.mark.timeout(900)  # several lives of a job each
NAMES = "127.0.0.1 train-slice-0-0.train train-ramdisk train\n127.0.0.2 train-ramdisk train\n"
OWN_MOUNTS = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]


class Cluster:
    """Nodes with a ramdisk each, on which containers run as processes of this machine.

    What a path, a name or a port of a pod is here follows from the volumes and from one file of
    host names; nothing else of a container is changed.
    """

    def __init__(self, root: Path, manifests: list[Manifest]) -> None:
        self._root, self.manifests = root, manifests
        self.bucket = root / "bucket"
        self.program = root / "train.py"
        self.write_program(NEVER)
        (root / "hosts").write_text(Path("/etc/hosts").read_text() + NAMES)
        secret = root / "secret"
        secret.mkdir()
        (secret / "secret").write_text(
            "9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f"
        )
        (secret / "secret").chmod(0o440)
        self.running: list[subprocess.Popen[str]] = []
        self.port: ReservedPort | None = None

    def write_program(self, last_step: int) -> None:
        text = (ROOT / "docs" / "examples" / "cluster_jax.py").read_text()
        for old, new in (
            ("last_step = os.environ, 100\n", f"last_step = os.environ, {last_step}\n"),
            ("jnp.zeros(1024)", "jnp.zeros(1 << 19)"),  # smaller leaves are stored everywhere
        ):
            assert text.count(old) == 1
            text = text.replace(old, new)
        self.program.write_text(text)

    def ramdisk(self, node: int) -> Path:
        return self._root / f"node_{node}"

    def start(
        self, container: StartedContainer, node: int, **changes: str
    ) -> subprocess.Popen[str]:
        for name in ("data", "data/eckpt"):
            (self.ramdisk(node) / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        environ = {name: self._here(value, node) for name, value in container.environ.items()}
        command = [self._here(word, node) for word in container.command]
        bind = 'mount --bind "$0" /etc/hosts && exec "$@"'
        process = subprocess.Popen(
            [*OWN_MOUNTS, "sh", "-c", bind, str(self._root / "hosts"), *command],
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": environ.get("ECKPT_DEVICES_PER_HOST", "1"),
                **environ,
                **changes,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def _here(self, text: str, node: int) -> str:
        for there, here in (
            ("/ramdisk", str(self.ramdisk(node) / "data")),
            ("/events", str(self.ramdisk(node) / "events")),
            ("/etc/eckpt", str(self._root / "secret")),
            ("/app/train.py", str(self.program)),
            ("gs://bucket", str(self.bucket)),
        ):
            text = text.replace(there, here) if text.startswith(there) else text
        return text

    def start_trainers(self, first_node: int = 0) -> list[subprocess.Popen[str]]:
        """Start the JobSet's pods, a node each. They share an address, so ports are free ones."""
        self.port = ReservedPort()
        coordinator = self.port.address.rpartition(":")[2]
        return [
            self.start(
                container,
                first_node + index,
                ECKPT_PEER_PORT="0",
                ECKPT_OBSERVERS="event_log prometheus(0)",
                ECKPT_COORDINATOR_ADDRESS=re.sub(
                    ":8476$", f":{coordinator}", container.environ["ECKPT_COORDINATOR_ADDRESS"]
                ),
            )
            for index, container in enumerate(started_trainers(self.manifests))
        ]

    def start_servers(self) -> list[subprocess.Popen[str]]:
        """Start the servers on the first nodes, and wait until they answer."""
        specs = pod_specs(self.manifests)
        containers = [each for spec in specs for kind in ("initContainers", "containers")
                      for each in spec[kind]]  # fmt: skip
        (container,) = [each for each in containers if each["name"] == "serve"]
        servers: list[subprocess.Popen[str]] = []
        for node in range(SLICES):
            server = self.start(started(container, {}, pod_ip=f"127.0.0.{node + 1}"), node)
            assert server.stdout is not None
            line = server.stdout.readline()
            assert re.fullmatch(rf"serving [0-9a-f]{{32}}@127.0.0.{node + 1}:7412\n", line), line
            servers.append(server)
        return servers

    def wait_for_saves(self) -> None:
        """Wait until each of the first nodes has a step that is whole."""
        deadline_s = time.monotonic() + LONG_S
        for node in range(SLICES):
            while complete_in(self.ramdisk(node)) < 0:
                assert time.monotonic() < deadline_s
                assert all(process.poll() is None for process in self.running)
                time.sleep(0.02)

    def lose_all_but_ram(self) -> int:
        """Kill all processes, and remove what storage has; return the newest step in RAM."""
        self.kill_all()
        shutil.rmtree(self.bucket, ignore_errors=True)
        return self.newest_in_ram()

    def newest_in_ram(self) -> int:
        """Return the newest step that a process knows to be whole."""
        return max(complete_in(self.ramdisk(node)) for node in range(SLICES))

    def kill_all(self) -> None:
        if self.port is not None:
            self.port.close()
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self.running.clear()


@pytest.fixture
def new_cluster(
    ramdisk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def make(name: str, source: str, *edits: tuple[str, str], **changes: str) -> Cluster:
        shape = {"slices": str(SLICES), "hosts": "1", "topology": "2x2"}
        shape |= {"state_gib": str(2 / 1024), "ramdisk_gib": str(64 / 1024)}
        template = edited(tmp_path, source, *edits)
        assert eckpt_here(*words(source, template=template, **shape, **changes)) == 0
        (ramdisk / name).mkdir()
        manifests = without_rights(manifests_in(capsys.readouterr().out))
        clusters.append(Cluster(ramdisk / name, manifests))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.kill_all()


def results(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Return the step after which each process began, and its result."""
    found: list[tuple[str, str]] = []
    for process in processes:
        output, _ = process.communicate(timeout=LONG_S)
        assert process.returncode == 0, output
        (began,) = re.findall(r"start after step (\w+)", output)
        (result,) = re.findall(r"done: (.+)", output)
        found.append((began, result))
    return found


def test_job_of_the_manifests_survives_the_loss_of_a_node(
    new_cluster: Callable[..., Cluster],
) -> None:
    cluster = new_cluster("lost", "in-place")
    cluster.start_trainers()
    cluster.wait_for_saves()
    last_step = cluster.lose_all_but_ram() + 100
    shutil.rmtree(cluster.ramdisk(1))
    cluster.write_program(last_step)
    again = results(cluster.start_trainers())
    assert min(int(began) for began, _ in again) > 0
    whole = new_cluster("whole", "in-place")
    whole.write_program(last_step)
    undisturbed = results(whole.start_trainers())
    assert [began for began, _ in undisturbed] == ["None", "None"]
    assert [result for _, result in again] == [result for _, result in undisturbed]


def command_of_the_page(words: str) -> list[str]:
    """Return the command with ``words`` that the page gives for a pod of the DaemonSet."""
    text = (GKE / "README.md").read_text().replace("\\\n", " ")
    (line,) = [each for each in text.splitlines() if each.startswith("kubectl") and words in each]
    kubectl, command = line.split(" -- ")
    assert kubectl == "kubectl exec POD -c serve"
    return command.split()


def test_commands_of_the_page_show_steps_and_free_them(
    new_cluster: Callable[..., Cluster],
) -> None:
    cluster = new_cluster("seen", "daemonset")
    (pod,) = pod_specs([one(cluster.manifests, "DaemonSet")])
    environ = started(pod["containers"][0], {}, pod_ip="127.0.0.1").environ

    def in_pod(words: str) -> tuple[int, str]:
        process = cluster.start(StartedContainer(command_of_the_page(words), environ), 0)
        output, _ = process.communicate(timeout=LONG_S)
        return process.returncode, output

    cluster.start_trainers()
    cluster.wait_for_saves()
    status, output = in_pod("eckpt doctor --clean")
    assert status == 1
    assert "stays: in use by process" in output
    cluster.kill_all()
    cluster.start_servers()
    status, output = in_pod("eckpt ls")
    assert status == 0, output
    assert "train" in output
    status, output = in_pod("eckpt doctor --clean")
    assert status == 0, output
    assert "removed: process_0000" in output
    assert not (cluster.ramdisk(0) / "data" / "eckpt" / "train").exists()
    assert complete_in(cluster.ramdisk(1)) >= 0, "the next host's is freed there"
    assert (cluster.ramdisk(0) / "events" / "events_00000.jsonl").stat().st_size > 0


@pytest.mark.slow
def test_drain_in_the_daemonset_saves_what_ram_had(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster("drained", "daemonset")
    cluster.start_trainers()
    cluster.wait_for_saves()
    cluster.lose_all_but_ram()
    (pod,) = pod_specs([one(cluster.manifests, "DaemonSet")])
    environ = started(pod["containers"][0], {}, pod_ip="127.0.0.1").environ
    cluster.start_servers()
    command = command_of_the_page("eckpt drain")
    drain = cluster.start(StartedContainer(command, environ), 1)
    output, _ = drain.communicate(timeout=LONG_S)
    assert drain.returncode == 0, output
    (step,) = re.findall(r"drained step (\d+) to ", output)
    assert (cluster.bucket / "run7" / step).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "edits"), [("daemonset", [("- '900'", "- '20'")]), ("in-place", [])]
)
def test_servers_drain_a_job_that_failed(
    new_cluster: Callable[..., Cluster], source: str, edits: list[tuple[str, str]]
) -> None:
    # One copy of each shard: the RAM of both nodes is needed.
    cluster = new_cluster(source, source, *edits, placement="striped(1)")
    servers = cluster.start_servers()
    trainers = cluster.start_trainers()
    cluster.wait_for_saves()
    for trainer in trainers:  # the last life of the JobSet: no other one follows
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
    newest = cluster.newest_in_ram()
    if source == "in-place":  # its pods are deleted
        for server in servers:
            server.send_signal(signal.SIGTERM)
    assert servers[0].stdout is not None
    lines = iter(servers[0].stdout.readline, "")
    (step,) = next(found for line in lines if (found := re.findall(r"drained step (\d+)", line)))
    assert int(step) >= newest
    if source == "in-place":
        assert [server.wait(LONG_S) for server in servers] == [0, 0]
    cluster.kill_all()
    cluster.write_program(int(step) + 10)
    again = results(cluster.start_trainers(first_node=SLICES))  # nodes without RAM
    assert [began for began, _ in again] == [step, step]


def test_wrong_setting_exits_with_the_status_of_no_restart(
    new_cluster: Callable[..., Cluster],
) -> None:
    cluster = new_cluster("wrong", "in-place")
    (cluster.ramdisk(0).parent / "secret" / "secret").write_text("short")
    processes = cluster.start_trainers()
    for process in processes:
        output, _ = process.communicate(timeout=LONG_S)
        assert process.returncode == os.EX_CONFIG, output
        assert "not 32 to 4096" in output
    job = one(cluster.manifests, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [os.EX_CONFIG]


def test_doctor_of_the_pod_passes_on_a_sound_node(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster("sound", "gke-driver")
    (pod,) = pod_specs([one(cluster.manifests, "JobSet")])
    (container,) = pod["initContainers"]
    doctor = cluster.start(started(container, {}, pod_ip="127.0.0.1"), 0)
    output, _ = doctor.communicate(timeout=LONG_S)
    assert doctor.returncode == 0, output


def test_mounting_container_makes_the_tmpfs_once(tmp_path: Path) -> None:
    (container,) = pod_specs(
        [one(manifests_in((GKE / "daemonset.yaml").read_text()), "DaemonSet")]
    )[0]["initContainers"]
    shell, options, script = container["command"]
    names = {variable["name"] for variable in container["env"]}
    assert (shell, options) == ("/bin/sh", "-euc")
    assert names == {"RAMDISK", "EVENTS", "SIZE_BYTES", "OWNER"}
    again = 'echo kept > "$RAMDISK/data/step"; SIZE_BYTES=8388608\n' + script
    shown = (
        'cat "$RAMDISK/data/step"; grep " $RAMDISK " /proc/self/mountinfo;'
        ' stat -c "%a %n" "$RAMDISK/data" "$EVENTS"'
    )
    done = subprocess.run(
        [*OWN_MOUNTS, shell, options, f"{script}\n{again}\n{shown}"],
        env={"PATH": os.environ["PATH"], "RAMDISK": str(tmp_path / "ramdisk")}
        | {"EVENTS": str(tmp_path / "events")}
        | {"SIZE_BYTES": "4194304", "OWNER": "0:0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kept, mount, *modes = done.stdout.splitlines()
    assert kept == "kept"
    assert re.search(r" - tmpfs eckpt .*size=8192k", mount)
    assert [mode.split()[0] for mode in modes] == ["700", "700"]
