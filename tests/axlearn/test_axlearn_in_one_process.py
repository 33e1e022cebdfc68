"""axlearn's checkpointer in a job of one process: what hears its events, and what tools find."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from faults import storage_fails
from world import World, storage_lacks

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event
from emergency_ckpt.extras.event_log import read_events
from emergency_ckpt.observer import JobView, Observer

MANY = 10_000


@dataclasses.dataclass(eq=False)
class Noted(Observer):
    """Notes its calls in a file; a dataclass, since axlearn's configs hold copies of these alone.

    Attributes:
      path: of the file.
    """

    path: str

    def _note(self, call: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{call}\n")

    def __call__(self, event: Event) -> None:
        self._note(event.name)

    def begin(self, process_index: int) -> None:
        self._note("begin")

    def join(self, job: JobView) -> None:
        self._note("join")

    def leave(self, job: JobView) -> None:
        self._note("leave")

    def close(self) -> None:
        self._note("close")


@pytest.fixture
def opened(axlearn_face: Any, world: World) -> Any:
    """Make a checkpointer that saves each step to RAM, and those in ``stored`` to storage."""
    function_config: Any = importlib.import_module("axlearn.common.config").config_for_function

    def policy(steps: Any) -> Any:
        return function_config(lambda: lambda *, step, evaler_summaries: step in steps)

    def made(stored: Any = (), **settings: Any) -> Any:
        cfg = axlearn_face.EmergencyCheckpointer.default_config().set(
            name="checkpointer",
            dir=str(world.persistent),
            trainer_dir=str(world.persistent),
            local_dir=str(world.ramdisk),
            local_save_policy=policy(range(1, MANY)),
            save_policy=policy(stored),
            replica_axis_index=0,
            keep_last_n=MANY,
        )
        return cfg.set(**settings).instantiate(parent=None)

    return made


def save(checkpointer: Any, world: World, step: int) -> None:
    checkpointer.save(step=step, state=world.state(step))
    checkpointer.wait_until_finished()


@pytest.mark.parametrize("form", ["function", "text", "observer", "list"])
def test_axlearn_config_has_listeners_of_every_kind(
    world: World, opened: Any, tmp_path: Path, form: str
) -> None:
    noted, log = tmp_path / "noted", tmp_path / "log"
    given: dict[str, Any] = {
        "function": world.events.append,
        "text": f"event_log({log})",
        "observer": Noted(str(noted)),
    }
    on_event = list(given.values()) if form == "list" else given[form]
    checkpointer = opened(stored=(2,), on_event=on_event)
    with checkpointer:
        save(checkpointer, world, 1)
        save(checkpointer, world, 2)
    heard = {
        "function": world.names(),
        "text": [event.name for event in read_events(log).events] if log.exists() else [],
        "observer": noted.read_text().split() if noted.exists() else [],
    }
    for kind, names in heard.items():
        if form in (kind, "list"):
            assert names.count("save.complete") == 2, kind
            assert names.count("persistent.complete") == 1, kind
    if form in ("observer", "list"):
        assert heard["observer"][0] == "begin"
        assert heard["observer"][-1] == "close"
        assert heard["observer"].index("join") < heard["observer"].index("leave")


def test_step_that_ram_gives_to_storage_at_the_end_has_an_index(
    axlearn_face: Any, world: World, opened: Any
) -> None:
    """No other save to storage is due within the hour after the first one."""
    last = 1
    checkpointer = opened(save_every_n_seconds=3600, on_event=world.events.append)
    with checkpointer:
        while not world.named("persistent.complete"):
            save(checkpointer, world, last)
            last += 1
        save(checkpointer, world, last)
        assert not world.named("save.started", step=last, tier="persistent")
    base = str(world.persistent)
    assert axlearn_face.EmergencyCheckpointer.latest_checkpoint_step(base) == last
    tools: Any = importlib.import_module("axlearn.common.checkpointer")
    paths = axlearn_face.EmergencyCheckpointer.checkpoint_paths(base)
    assert tools.indexed_steps(base) == paths
    spec = tools.read_state_spec(paths[-1])
    shapes = {name: tuple(array.shape) for name, array in spec.items()}
    assert shapes == {"empty": (0, 4), "step": (), "w": (8, 4)}
    entries = json.loads((Path(paths[-1]) / "index").read_text())
    assert entries[0] == ["step", last]
    assert ["host", last] in entries


def test_axlearn_exit_with_status_0_raises_a_lost_last_save(
    world: World, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage_fails(monkeypatch, "finish")
    checkpointer = opened(stored=(1,))
    with storage_lacks(1, "storage failed"), checkpointer:
        checkpointer.save(step=1, state=world.state(1))
        raise SystemExit(0)


def test_steps_of_axlearns_own_checkpointer_are_refused_and_stay(world: World, opened: Any) -> None:
    own = world.persistent / "step_00000001"
    (own / "gda").mkdir(parents=True)
    (own / "index").write_text("its")
    with pytest.raises(ConfigError, match="step_00000001/gda of another checkpointer"):
        opened(stored=(1, 2, 3))
    (world.persistent / "step_00000009").mkdir()
    checkpointer = opened(stored=(1, 2, 3), keep_last_n=1)
    with checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, world, step)
    assert (own / "index").read_text() == "its"
    assert (own / "gda").is_dir()
    assert not (world.persistent / "step_00000002").exists(), "an index of ours goes with its step"
    assert (world.persistent / "step_00000003" / "index").is_file()
