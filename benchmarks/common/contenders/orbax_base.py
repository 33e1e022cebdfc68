"""Common part of Orbax's managers: one session, from start to restore."""

from collections.abc import Callable
from typing import Any

from benchmarks.common.contenders import PyTree


class OrbaxSession:
    """A session of one manager.

    Args:
      name: of the manager, for errors.
      manager: a checkpoint manager of Orbax's.
      save_args: makes the ``args`` of its ``save`` from a state.
      restore_args: the ``args`` of its ``restore``; None: it takes none.
      state_of: finds the state in what its ``restore`` returns.
    """

    def __init__(
        self,
        name: str,
        manager: Any,
        save_args: Callable[[PyTree], Any],
        restore_args: Any = None,
        state_of: Callable[[Any], PyTree] = lambda composite: composite.state,
    ) -> None:
        self._name = name
        self._manager = manager
        self._save_args = save_args
        self._restore_args = {} if restore_args is None else {"args": restore_args}
        self._state_of = state_of

    def start_fresh(self) -> None:
        if (latest := self._manager.latest_step()) is not None:
            raise RuntimeError(f"{self._name} offers step {latest} of an empty directory")

    def save(self, step: int, state: PyTree) -> None:
        if not self._manager.save(step, args=self._save_args(state)):
            raise RuntimeError(f"{self._name} declined to save step {step}")

    def wait(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def newest(self) -> tuple[int | None, PyTree]:
        if (latest := self._manager.latest_step()) is None:
            return None, None
        restored = self._manager.restore(latest, **self._restore_args)
        # The number may be one of numpy's, where a broadcast agreed on it.
        return int(latest), self._state_of(restored)

    def close(self) -> None:
        self._manager.close()
