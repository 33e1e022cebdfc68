"""axlearn's checkpointer in a job of one process: what hears its events."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from world import World

from emergency_ckpt.events import Event
from emergency_ckpt.extras.event_log.reader import read_events
from emergency_ckpt.observer import JobView, Observer

LAST = 3


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
def trained(axlearn_face: Any, world: World) -> Any:
    """Saves steps 1 to LAST to RAM, and those in ``stored`` to storage, and ends well."""
    function_config: Any = importlib.import_module("axlearn.common.config").config_for_function

    def run(stored: tuple[int, ...] = (), **settings: Any) -> Any:
        def policy(*steps: int) -> Any:
            return function_config(lambda: lambda *, step, evaler_summaries: step in steps)

        cfg = axlearn_face.EmergencyCheckpointer.default_config().set(
            name="checkpointer",
            dir=str(world.persistent),
            trainer_dir=str(world.persistent),
            local_dir=str(world.ramdisk),
            local_save_policy=policy(*range(1, LAST + 1)),
            save_policy=policy(*stored),
            replica_axis_index=0,
            keep_last_n=LAST,
        )
        checkpointer = cfg.set(**settings).instantiate(parent=None)
        with checkpointer:
            for step in range(1, LAST + 1):
                checkpointer.save(step=step, state=world.state(step))
                checkpointer.wait_until_finished()
        return checkpointer

    return run


@pytest.mark.parametrize("form", ["function", "text", "observer", "list"])
def test_axlearn_config_has_listeners_of_every_kind(
    world: World, trained: Any, tmp_path: Path, form: str
) -> None:
    noted, log = tmp_path / "noted", tmp_path / "log"
    given: dict[str, Any] = {
        "function": world.events.append,
        "text": f"event_log({log})",
        "observer": Noted(str(noted)),
    }
    on_event = list(given.values()) if form == "list" else given[form]
    trained(stored=(LAST,), on_event=on_event)
    heard = {
        "function": world.names(),
        "text": [event.name for event in read_events(log).events] if log.exists() else [],
        "observer": noted.read_text().split() if noted.exists() else [],
    }
    for kind, names in heard.items():
        if form in (kind, "list"):
            assert names.count("save.complete") == LAST, kind
            assert "persistent.complete" in names, kind
    if form in ("observer", "list"):
        assert heard["observer"][0] == "begin"
        assert heard["observer"][-1] == "close"
        assert heard["observer"].index("join") < heard["observer"].index("leave")
    (index,) = world.persistent.glob("step_*/index")
    assert json.loads(index.read_text())[0] == ["step", LAST]
