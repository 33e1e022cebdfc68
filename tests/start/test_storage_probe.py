"""What saves need of storage is tried at a start that requires it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import JOBS
from programs import ended, printed_beside_bucket
from storage_probe_program import OLD, OWN, YOUNG
from world import LONG_S, World, save_all

from emergency_ckpt.config import Config
from emergency_ckpt.errors import ConfigError, PersistentTierError
from emergency_ckpt.storage import directory as storage_directory
from emergency_ckpt.storage.directory import StorageDirectory, is_left_over

PROGRAM = JOBS / "storage_probe_program.py"


@pytest.fixture
def refusing(world: World) -> Path:
    """A directory that is there, and in which no save could write its host states."""
    world.persistent.mkdir()
    (world.persistent / "host_state").write_text("in the way")
    return world.persistent


def warnings_of(world: World) -> list[str]:
    return [str(e.fields["text"]) for e in world.named("warning", cause="setting")]


def test_start_required_storage_that_refuses_is_an_error(world: World, refusing: Path) -> None:
    del refusing
    with pytest.raises(PersistentTierError, match="host_state/probe-"):
        world.open_both(require={"storage"})
    world.open().stop()  # nothing of the failed start is left in the way


def test_start_required_directory_that_cannot_be_made_is_error(world: World) -> None:
    blocker = world.persistent.parent / "file"
    blocker.write_text("")
    with pytest.raises(PersistentTierError, match="create "):
        world.open_both(dir=str(blocker / "dir"), require={"storage"})


def test_start_good_storage_is_silent_and_keeps_no_probe(world: World) -> None:
    with world.open_both():
        pass
    with world.open_both(require={"storage"}):
        pass
    assert warnings_of(world) == []
    left = {path.name for path in world.persistent.rglob("*")}
    log = {"000000000001.json", "000000000002.json"}  # each start took a number
    assert left == {"host_state", "log", "newest", *log}


def test_start_job_that_only_restores_writes_nothing(world: World, refusing: Path) -> None:
    for required in (False, True):
        with world.open_both(save_every=0, require={"storage"} if required else ()):
            pass
    assert warnings_of(world) == []
    assert [path.name for path in refusing.rglob("*")] == ["host_state"]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Storage takes what is written, and does not answer until the test is over."""
    asked, answer = threading.Event(), threading.Event()

    def put_new(self: StorageDirectory, below: str, data: bytes) -> None:
        del self, below, data
        asked.set()
        assert answer.wait(LONG_S)

    monkeypatch.setattr(storage_directory.StorageDirectory, "put_new", put_new)
    yield asked
    answer.set()


def test_start_required_silent_storage_ends_at_its_deadline(
    world: World, silent: threading.Event
) -> None:
    with pytest.raises(PersistentTierError, match="no answer in time"):
        world.open_both(require={"storage"}, start_timeout_s=4)
    assert silent.is_set()


def test_bucket_that_never_answers_ends_by_the_starts_timeout(ramdisk: Path) -> None:
    """Neither the timeout of a save to storage nor that of a restore, which are much longer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        env = {"STORAGE_EMULATOR_HOST": f"http://{host}:{port}"}
        done = ended(JOBS / "unanswered_program.py", ramdisk, env=env)
    assert done.returncode == 0, done.stderr
    said = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "gs://bucket/run" in said["error"]
    for part in ("start", "restore"):
        assert "persistent.problem.waiting" in said[part]
        assert "persistent.problem.unreachable" in said[part]
    told = "gs://bucket/run has not answered yet: it is asked for its step log and its steps"
    assert done.stderr.count(told) >= 2


def test_probes_left_by_crashed_starts_do_no_harm(world: World) -> None:
    folder = world.persistent / "host_state"
    folder.mkdir(parents=True)
    (folder / OLD).write_text("left")
    (folder / "probe-of-somebody").write_text("kept")
    with world.open_both(require={"storage"}) as checkpointer:
        assert checkpointer.all_steps() == []
        save_all(checkpointer, world, 2)
        assert checkpointer.all_steps() == [2]
    assert sorted(path.name for path in folder.iterdir()) == ["2", "log", "probe-of-somebody"]


@pytest.mark.parametrize(
    ("name", "is_left"),
    [
        (OLD, True),
        (YOUNG, False),
        (f"probe-{OWN}", False),
        ("40", False),
        ("timeline.json", False),
        (f"{OLD}.json", False),
        (f"{'0a' * 8}.{OLD}.tmp", True),
        (f"{'0a' * 8}.probe-{OWN}.tmp", False),
        (f"x.{OLD}.tmp", False),
        ("probe-999999999999-00000000000000bb", False),
    ],
)
def test_is_left_over_needs_an_earlier_start(name: str, is_left: bool) -> None:
    assert is_left_over(name, f"probe-{OWN}") == is_left


def test_config_required_storage_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match="require has 'storage', but dir is not"):
        Config(local_dir="/dev/shm/x", run_id="r", require={"storage"}).validated()


@pytest.fixture(scope="module")
def tries() -> dict[str, Any]:
    return printed_beside_bucket("storage_probe_program.py")


@pytest.mark.parametrize(
    ("name", "error", "left"),
    [
        ("good", "", []),
        ("left", "", [YOUNG]),
        ("lost_reply", "", []),
        ("precondition", "", []),
        ("refused", "the right to create there", []),
        ("undeletable", "remove gs://bucket/undeletable", [f"probe-{OWN}"]),
        ("left_undeletable", "the right to delete there", [OLD]),
        ("silent", "no answer in time", []),
        ("taken", "FileExistsError", []),
        ("no_bucket", "create the bucket", []),
    ],
)
def test_probe_storage_of_a_bucket(
    tries: dict[str, Any], name: str, error: str, left: list[str]
) -> None:
    found = tries[name]
    assert bool(found["error"]) == bool(error), found
    assert error in found["error"]
    assert found["steps"] == []
    assert found["left"] == left


def test_replacement_that_a_bucket_refuses_once_is_made(tries: dict[str, Any]) -> None:
    assert tries["replaced"] == "newest"
