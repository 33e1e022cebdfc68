"""The preemption save that the processes of a life agreed on, as their event log tells of it."""

from __future__ import annotations

import time
from pathlib import Path

from emergency_ckpt.extras.event_log.reader import LogTail
from emergency_ckpt.extras.event_log.records import LoggedEvent
from emergency_ckpt.tools.event_fields import text, whole
from emergency_ckpt.types import LOCAL, PERSISTENT

_MARGIN_S = 5.0
"""Time after ``preemption_grace_s`` in which a process ends: its threads, JAX, the interpreter."""
_READ_EVERY_S = 0.1
_SAVED = {
    "save.complete": LOCAL,
    "persistent.complete": PERSISTENT,
}


class AgreedStep:
    """Follows the log of one life, from its beginning. The log has events of its processes only.

    Attributes:
      step: the step that all processes act on; None when no notice has come so far.
    """

    def __init__(self, event_log: Path, life: int) -> None:
        self.step: int | None = None
        self._tail = LogTail(event_log)
        self._life = life
        self._read_s = 0.0
        self._ends_s = 0.0  # Unix time, as in events
        self._tiers: dict[tuple[int | None, str], bool] = {}  # of steps: whether it is saved there

    def left_s(self) -> float:
        """Return for how many seconds the processes may still need; 0 without an agreed step."""
        if time.monotonic() >= self._read_s + _READ_EVERY_S:
            self._read()
        return 0.0 if self.step is None else max(0.0, self._ends_s - time.time())

    def not_saved(self) -> tuple[str, ...]:
        """Return the tiers that the agreed step is not in, though it was to be saved there.

        All of them, by the name "any", when no save of it has begun.
        """
        self._read()
        if self.step is None:
            return ()
        tiers = {tier: saved for (step, tier), saved in self._tiers.items() if step == self.step}
        return tuple(sorted(t for t, saved in tiers.items() if not saved)) if tiers else ("any",)

    def _read(self) -> None:
        self._read_s = time.monotonic()
        for event in self._tail.read_new():
            if event.life == self._life and event.process is not None:
                self._take(event)

    def _take(self, event: LoggedEvent) -> None:
        step, tier = whole(event, "step"), text(event, "tier")
        if event.name in _SAVED:
            self._tiers[step, _SAVED[event.name]] = True
        elif event.point == "save.skipped.kept" and tier:
            self._tiers[step, tier] = True
        elif event.point in ("save.started", "preemption.missed.not_written") and tier:
            self._tiers.setdefault((step, tier), False)
        elif event.name == "preemption.reached" and step is not None:
            grace_s = event.fields.get("grace_s")
            if isinstance(grace_s, int | float):
                self.step = step
                self._ends_s = max(self._ends_s, event.time_s + grace_s + _MARGIN_S)
