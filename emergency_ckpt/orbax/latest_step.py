"""The newest complete step as a manager reports it without communication."""

from __future__ import annotations

from collections.abc import Sequence


class LatestStep:
    """The newest step found or restored, until a newer one is complete.

    Attributes:
      goes_on_from: the older step that was restored while newer ones remain, until the next save;
        else None.
    """

    def __init__(self) -> None:
        self._found: int | None = None
        self.goes_on_from: int | None = None

    def note_found(self, steps: Sequence[int]) -> None:
        """Set the complete steps, oldest first."""
        self._found = steps[-1] if steps else None

    def note_restored(self, step: int, before: int | None) -> None:
        """``before``: the newest step that remains in addition until the next save."""
        if before is not None and before > step:
            self._found, self.goes_on_from = before, step
        else:
            self._found, self.goes_on_from = step, None

    def note_save_started(self) -> None:
        """Forget every step newer than a requested one."""
        if self.goes_on_from is not None:
            self._found, self.goes_on_from = self.goes_on_from, None

    def newest(self, saved: int | None) -> int | None:
        """Return the newest step; ``saved``: the newest completed save or restored step."""
        return max((step for step in (self._found, saved) if step is not None), default=None)
