"""The newest whole step, as a manager names it without asking anybody."""

from __future__ import annotations

from collections.abc import Sequence


class LatestStep:
    """The newest step found or restored, until a newer one is whole."""

    def __init__(self) -> None:
        self._found: int | None = None
        self._goes_on_from: int | None = None

    def note_found(self, steps: Sequence[int]) -> None:
        """All whole steps, oldest first."""
        self._found = steps[-1] if steps else None
        self._goes_on_from = None

    def note_restored(self, step: int, before: int | None) -> None:
        """``before``: the newest step that is left beside it, until the next save."""
        if before is not None and before > step:
            self._found, self._goes_on_from = before, step
        else:
            self._found, self._goes_on_from = step, None

    def note_save_started(self) -> None:
        """Forget every step newer than one that was asked for."""
        if self._goes_on_from is not None:
            self._found, self._goes_on_from = self._goes_on_from, None

    def newest(self, saved: int | None) -> int | None:
        """``saved``: the newest step that was saved whole or restored."""
        return max((step for step in (self._found, saved) if step is not None), default=None)
