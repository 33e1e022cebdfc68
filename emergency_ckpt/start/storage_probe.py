"""Test of the persistent directory at the start, before the first save."""

from __future__ import annotations

import threading
import time

from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.events import EventSink
from emergency_ckpt.storage.probe import probe_storage
from emergency_ckpt.storage.tier import PersistentTier

_END_TIMEOUT_S = 1.0


class StorageProbe:
    """One test of the persistent directory, for the process that leads the writers.

    Args:
      timeout_s: maximum duration of the test.
    """

    def __init__(
        self, tier: PersistentTier, incarnation: str, events: EventSink, timeout_s: float
    ) -> None:
        self._tier = tier
        self._incarnation = incarnation
        self._events = events
        self._timeout_s = timeout_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Test it now. Blocks for storage; PersistentTierError when saves could not use it."""
        deadline_s = time.monotonic() + self._timeout_s
        probe_storage(self._tier.storage, self._incarnation, deadline_s)

    def start(self) -> None:
        """Test it in the background; a failure is a warning. Does not block. Call once."""
        # A daemon, so that the interpreter's end does not wait for storage.
        self._thread = threading.Thread(target=self._warn, name="eckpt-probe", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop reporting, and wait at most a second so that a running test can clean up.

        A later start removes its leftovers otherwise.
        """
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT_S)
        self._ended.set()

    def _warn(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - reported, also when unexpected
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            if not self._ended.is_set():
                directory = self._tier.directory
                text = f"saves to {directory} would fail now; they are tried anyway: {kind}{error}"
                self._events.emit("start.warning", text=text)
