"""This project's checkpointer with its default placement policy; lost shards are fetched."""

from typing import Any

from benchmarks.common.contenders import BOTH, RAM, STORAGE, PyTree, Site
from emergency_ckpt import EmergencyCheckpointer, Event

_OFF = 0
_COMPLETE = {"save.complete", "persistent.complete"}


def prepare() -> None:
    """Do nothing, because the checkpointer needs no set-up."""


class OurSession:
    """Our checkpointer with these settings and one active tier."""

    def __init__(self, abstract_state: PyTree, **settings: Any) -> None:
        self._abstract_state = abstract_state
        config = EmergencyCheckpointer.default_config().set(on_event=self._note, **settings)
        self._complete_step: int | None = None
        self._saved_step: int | None = None
        self.ready_s = 0.0
        self.spent_s: dict[str, float] = {}
        self._checkpointer = EmergencyCheckpointer(config)
        self._checkpointer.__enter__()

    def start_fresh(self) -> None:
        # Also tells the checkpointer how large the state is, so that it reserves its slots.
        found, _ = self.newest()
        if found is not None:
            raise RuntimeError(f"the checkpointer restored step {found} of an empty ramdisk")

    def save(self, step: int, state: PyTree) -> None:
        self.ready_s = 0.0
        if not self._checkpointer.save(step=step, state=state):
            raise RuntimeError(f"the checkpointer declined to save step {step}")
        self._saved_step = step

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()
        self._checkpointer.check_for_errors()
        if self._complete_step != self._saved_step:
            raise RuntimeError(f"the save of step {self._saved_step} is not complete everywhere")

    def newest(self) -> tuple[int | None, PyTree]:
        return self._checkpointer.restore(state=self._abstract_state)

    def _note(self, event: Event) -> None:
        if event.name in _COMPLETE:
            self._complete_step = event.fields["step"]
        elif event.name == "save.captured":  # one for each tier
            self.ready_s += event.fields["ready_seconds"]
        elif event.name == "restore.phases":
            self.spent_s = {name.removesuffix("_seconds"): s for name, s in event.fields.items()}

    def close(self) -> None:
        self._checkpointer.__exit__(None, None, None)


def open_session(site: Site, **settings: Any) -> OurSession:
    """Build the checkpointer; ``settings`` are those other than the defaults."""
    return OurSession(
        site.abstract_state,
        dir=str(site.persistent_dir),
        local_dir=str(site.local_dir),
        run_id="benchmark",
        local_save_every=_OFF if site.tier == STORAGE else 1,
        save_every={RAM: _OFF, STORAGE: 1, BOTH: site.stored_every}[site.tier],
        bind_host=site.bind_host,
        mesh=site.mesh,
        replica_axis=site.replica_axis,
        **settings,
    )
