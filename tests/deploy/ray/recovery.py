"""Ray's own cluster loses a worker with its RAM, a whole raylet, and gets a preemption notice.

`make test-ray` runs it, in a virtual environment with Ray; the file's name keeps it out of
`make test`. Each run must end with the bits of an undisturbed one, iterator included, and Ray's
`Result` must name the last step in storage.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "deploy" / "ray"
sys.path.insert(0, str(EXAMPLE))
# Read by the raylets, which inherit them.
os.environ.update(
    PYTHONPATH=os.pathsep.join([str(EXAMPLE), str(Path(__file__).parent)]),
    JAX_PLATFORMS="cpu",
    RAY_TRAIN_V2_ENABLED="1",
    RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="180",
    RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S="1",
    RAY_USAGE_STATS_ENABLED="0",
    MEGASCALE_COORDINATOR_ADDRESS="gone:8080",
    MEGASCALE_NUM_SLICES="4",
    MEGASCALE_SLICE_ID="3",
    KEPT_BY_THE_SITE="yes",
)

import orbax.checkpoint as ocp  # noqa: E402
import ray  # noqa: E402
import train as example  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.train import CheckpointConfig, Result  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from emergency_ckpt.errors import ConfigError  # noqa: E402

WORKERS, LAST, SAVE_EVERY, STORE_EVERY, KEPT = 4, 40, 4, 8, 2
RUN_TIMEOUT_S = 600.0


class Notes:
    """Lines that the workers write; made here, sent to them, read here."""

    def __init__(self, root: Path) -> None:
        self.path = root / "notes.jsonl"
        self.pace_s = 0.1

    def note(self, **fields: Any) -> None:
        line = json.dumps({"pid": os.getpid(), "node": _node(), **fields}) + "\n"
        with self.path.open("a") as log:
            log.write(line)

    def on_event(self, event: Any) -> None:
        if event.name in ("restore.finished", "preemption.notice", "preemption.reached"):
            kept = {k: v for k, v in event.fields.items() if k in ("step", "source", "process")}
            self.note(event=event.name, **kept)
        elif event.name in ("save.complete", "persistent.complete"):
            self.note(event=event.name, step=event.fields["step"])

    def after_step(self, step: int) -> None:
        self.note(at=step)
        time.sleep(self.pace_s)

    def at_end(self, weights: Any, state: dict[str, int]) -> None:
        self.note(weights=weights.tobytes().hex(), position=state["position"])

    def lines(self) -> list[dict[str, Any]]:
        text = self.path.read_text() if self.path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def steps(self, event: str) -> list[int]:
        return [line["step"] for line in self.lines() if line.get("event") == event]


def _node() -> str:
    return ray.get_runtime_context().get_node_id()


class World:
    """A cluster of a head, which runs no worker, and one raylet for each worker."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.results = root / "results"
        self.secret = root / "secret"
        self.secret.touch(mode=0o600)
        self.secret.write_text(secrets.token_hex(32))
        self.ram: dict[str, Path] = {}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self.add() for _ in range(WORKERS)]
        self.cluster.wait_for_nodes()
        example.connect(self.cluster.address, logging_level="warning")

    def add(self) -> Any:
        ram = self.root / "ram" / str(len(self.ram))  # of its host, of which it is alone
        ram.mkdir(parents=True)
        node = self.cluster.add_node(
            num_cpus=1, object_store_memory=80 << 20, env_vars={"ECKPT_LOCAL_DIR": str(ram)}
        )
        self.ram[node.node_id] = ram
        return node

    def steps_of(self, name: str) -> list[int]:
        """The steps of a run that lie in storage, whole or not."""
        folders = [path.name for path in (self.results / name / example.STEPS).iterdir()]
        return sorted(int(name) for name in folders if name.isdigit())

    def run(
        self,
        name: str,
        fault: Callable[[World, Notes], None] | None = None,
        last: int = LAST,
    ) -> tuple[dict[str, Any], Notes]:
        """Train to the end, with ``fault`` once every worker is at step 9 or later."""
        notes = Notes(self.root / f"{name}-{last}")
        notes.path.parent.mkdir()
        config = {
            "run_id": name,
            "secret_file": str(self.secret),
            "save_every": SAVE_EVERY,
            "store_every": STORE_EVERY,
            "last_step": last,
            "on_event": notes.on_event,
            "after_step": notes.after_step,
            "at_end": notes.at_end,
        }
        strikes: list[BaseException] = []  # printed at once: without its fault a run may not end

        def strike() -> None:
            try:
                _wait(lambda: _all_at(notes, 9))
                assert fault is not None
                fault(self, notes)
            except BaseException as error:  # noqa: BLE001 - the test asserts it
                traceback.print_exception(error)
                strikes.append(error)

        thread = threading.Thread(target=strike, daemon=True)
        if fault is not None:
            thread.start()
        kept = CheckpointConfig(num_to_keep=KEPT)
        result = example.run(config, WORKERS, str(self.results), kept)
        assert strikes == []
        assert result.error is None, result.error
        self.check_result(result, name, last)
        ends = [line for line in notes.lines() if "weights" in line]
        assert len(ends) == WORKERS
        assert len({(each["weights"], each["position"]) for each in ends}) == 1
        return ends[0], notes

    def check_result(self, result: Result, name: str, last: int) -> None:
        """Ray names the newest steps, where the checkpointer wrote them; all RAM is free.

        On a busy machine storage may skip a step, and Ray may miss one where two were complete
        between two reports; never the last.
        """
        folder = self.results / name
        listed = [(Path(each.path), metrics) for each, metrics in result.best_checkpoints]
        assert 1 <= len(listed) <= KEPT
        assert {path.parent for path, _ in listed} == {folder / example.STEPS}
        assert [path.name for path, _ in listed] == [str(metrics["step"]) for _, metrics in listed]
        for _, metrics in listed:  # that of a notice was saved without
            asked = metrics["step"] % STORE_EVERY == 0
            assert set(metrics) == ({"step", "loss"} if asked else {"step"})
        assert (Path(result.checkpoint.path), result.metrics) == listed[-1]
        assert result.metrics["step"] == last
        with result.checkpoint.as_directory() as step, ocp.StandardCheckpointer() as reader:
            assert reader.metadata(Path(step, "default")) is not None
        there = {path.name for path in folder.iterdir()}
        assert there == {
            example.STEPS,
            "checkpoint_manager_snapshot.json",
            ".validate_storage_marker",
        }
        stored = self.steps_of(name)
        assert stored[-1] == last
        assert len(stored) <= KEPT
        up = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        assert [path for node in up & set(self.ram) for path in self.ram[node].glob("*")] == []


def _all_at(notes: Notes, step: int) -> bool:
    workers = {line["pid"] for line in notes.lines() if line.get("at", 0) >= step}
    whole = [each for each in notes.steps("save.complete") if each >= step - 1]
    return len(workers) == WORKERS and len(whole) >= WORKERS


def _wait(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + RUN_TIMEOUT_S / 2
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    root = Path(tempfile.mkdtemp(prefix="eckpt-ray-", dir="/dev/shm"))
    found = World(root)
    yield found
    ray.shutdown()
    found.cluster.shutdown()
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def undisturbed(world: World) -> dict[str, Any]:
    metrics, notes = world.run("undisturbed")
    assert notes.steps("restore.finished") == []
    return metrics


def _victim(notes: Notes) -> dict[str, Any]:
    return next(line for line in reversed(notes.lines()) if "at" in line)


def _check(metrics: dict[str, Any], undisturbed: dict[str, Any], notes: Notes, before: int) -> None:
    """All workers restored one step, the newest whole one, and ended with the same bits."""
    restored = notes.steps("restore.finished")
    assert len(restored) == WORKERS
    assert len(set(restored)) == 1
    assert restored[0] >= before
    assert metrics["weights"] == undisturbed["weights"]
    assert metrics["position"] == undisturbed["position"] == LAST


def _newest(notes: Notes) -> int:
    return max(notes.steps("save.complete"))


@ray.remote(num_cpus=0)
def _variables() -> list[str]:
    return [name for name in os.environ if name.startswith(("MEGASCALE_", "KEPT_BY_"))]


def test_variables_of_an_earlier_tpu_job_reach_no_worker(world: World) -> None:
    """A TPU's runtime would wait for the slices of then, before any line of the program."""
    places = [NodeAffinitySchedulingStrategy(each.node_id, soft=False) for each in world.nodes]
    given = ray.get([_variables.options(scheduling_strategy=place).remote() for place in places])
    assert given == [["KEPT_BY_THE_SITE"]] * len(places)


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_worker_killed_with_its_ram_resumes(world: World, undisturbed: dict[str, Any]) -> None:
    before: list[int] = []

    def kill(world: World, notes: Notes) -> None:
        victim = _victim(notes)
        before.append(_newest(notes))
        os.kill(victim["pid"], signal.SIGKILL)
        shutil.rmtree(world.ram[victim["node"]])

    metrics, notes = world.run("worker", kill)
    _check(metrics, undisturbed, notes, before[0])


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_raylet_lost_for_good_resumes_on_a_spare(world: World, undisturbed: dict[str, Any]) -> None:
    before: list[int] = []
    lost: list[str] = []

    def lose(world: World, notes: Notes) -> None:
        victim = _victim(notes)
        before.append(_newest(notes))
        node = next(each for each in world.nodes if each.node_id == victim["node"])
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        os.kill(victim["pid"], signal.SIGKILL)  # as a host's loss takes its worker along
        shutil.rmtree(world.ram[victim["node"]])
        lost.append(victim["node"])

    # In the main thread, and before: Ray installs handlers of signals.
    world.nodes.append(world.add())
    metrics, notes = world.run("raylet", lose)
    _check(metrics, undisturbed, notes, before[0])
    restored_on = {
        line["node"] for line in notes.lines() if line.get("event") == "restore.finished"
    }
    assert len(restored_on) == WORKERS
    assert lost[0] not in restored_on
    world.nodes = [each for each in world.nodes if each.node_id != lost[0]]


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_preemption_notice_saves_and_resumes(world: World, undisturbed: dict[str, Any]) -> None:
    def drain(world: World, notes: Notes) -> None:
        victim = _victim(notes)["node"]
        client = ray._raylet.GcsClient(address=world.cluster.address)
        deadline_ms = int((time.time() + 120.0) * 1000)
        preemption = 2  # autoscaler.DrainNodeReason
        accepted, why_not = client.drain_node(victim, preemption, "a test", deadline_ms)
        assert accepted, why_not

    world.nodes.append(world.add())
    metrics, notes = world.run("preempted", drain)
    (at,) = set(notes.steps("preemption.reached"))
    assert len(notes.steps("preemption.reached")) == WORKERS
    assert "ray" in {line.get("source") for line in notes.lines()}
    _check(metrics, undisturbed, notes, at)
    assert set(notes.steps("restore.finished")) == {at}, "nothing is lost"


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_run_that_ended_goes_on_from_storage(world: World, undisturbed: dict[str, Any]) -> None:
    """Its RAM is free. An older step is gone, as one put aside: Ray must not miss it."""
    older = world.steps_of("undisturbed")[:-1]
    assert older
    for step in older:
        shutil.rmtree(world.results / "undisturbed" / example.STEPS / str(step))
    _, notes = world.run("undisturbed", last=LAST + 2 * STORE_EVERY)
    assert set(notes.steps("restore.finished")) == {LAST}


def test_ray_removes_no_step_and_misses_none(tmp_path: Path) -> None:
    storage = example.storage_of(str(tmp_path))[0]
    step, other = tmp_path / example.STEPS / "8", tmp_path / "other"
    for folder in (step, other):
        folder.mkdir(parents=True)
        storage.delete_dir(str(folder))
    assert step.is_dir()
    assert not other.exists()
    step.rmdir()
    kinds = [each.type.name for each in storage.get_file_info([str(step), str(other)])]
    assert kinds == ["Directory", "NotFound"]


def test_what_cannot_be_kept_is_refused(world: World) -> None:
    by_score = CheckpointConfig(num_to_keep=3, checkpoint_score_attribute="loss")
    with pytest.raises(ConfigError, match="checkpoint_score_attribute together with num_to_keep"):
        example.trainer({"run_id": "refused"}, WORKERS, str(world.results), by_score)
    assert not (world.results / "refused").exists()
    assert example.kept_steps(CheckpointConfig(checkpoint_score_attribute="loss")) is None
