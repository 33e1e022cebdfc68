"""Plain Orbax: asynchronous saves to storage, each process reads its own shards. No RAM tier."""

from pathlib import Path

import orbax.checkpoint as ocp

from benchmarks.common.contenders import PyTree, Site


def prepare() -> None:
    """Do nothing, because plain Orbax needs no set-up."""


class PlainSession:
    """Orbax's own manager in ``directory``. It keeps every step, or ``max_to_keep`` of them."""

    def __init__(
        self, directory: Path, abstract_state: PyTree, max_to_keep: int | None = None
    ) -> None:
        self._abstract_state = abstract_state
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=max_to_keep),
        )

    def start_fresh(self) -> None:
        if (latest := self._manager.latest_step()) is not None:
            raise RuntimeError(f"Orbax offers step {latest} of an empty directory")

    def save(self, step: int, state: PyTree) -> None:
        if not self._manager.save(step, args=ocp.args.StandardSave(state)):
            raise RuntimeError(f"Orbax declined to save step {step}")

    def wait(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def newest(self) -> tuple[int | None, PyTree]:
        if (latest := self._manager.latest_step()) is None:
            return None, None
        args = ocp.args.StandardRestore(self._abstract_state)
        return latest, self._manager.restore(latest, args=args)

    def close(self) -> None:
        self._manager.close()


def open_session(site: Site) -> PlainSession:
    return PlainSession(site.persistent_dir, site.abstract_state)
