"""Common part of Orbax's two emergency managers: one session, from start to restore."""

from typing import Any

import orbax.checkpoint as ocp

from benchmarks.common.contenders import PyTree


class OrbaxSession:
    """A session of one manager.

    Args:
      name: of the manager, for errors.
      manager: an emergency or p2p checkpoint manager.
      composite: the ``Composite`` of arguments that this manager takes.
      restore_args: further arguments of its ``restore``.
    """

    def __init__(
        self, name: str, manager: Any, composite: Any, restore_args: dict[str, Any] | None = None
    ) -> None:
        self._name = name
        self._manager = manager
        self._composite = composite
        self._restore_args = restore_args or {}

    def start_fresh(self) -> None:
        if (latest := self._manager.latest_step()) is not None:
            raise RuntimeError(f"{self._name} offers step {latest} of an empty ramdisk")

    def save(self, step: int, state: PyTree) -> None:
        args = self._composite(state=ocp.args.PyTreeSave(state))
        if not self._manager.save(step, args=args):
            raise RuntimeError(f"{self._name} declined to save step {step}")

    def wait(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def newest(self) -> tuple[int | None, PyTree]:
        if (latest := self._manager.latest_step()) is None:
            return None, None
        # The number may be one of numpy's, where a broadcast agreed on it.
        return int(latest), self._manager.restore(latest, **self._restore_args).state

    def close(self) -> None:
        self._manager.close()
