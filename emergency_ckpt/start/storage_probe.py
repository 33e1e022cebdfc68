"""Storage is tried at the start, so that what is wrong with it is said before the first save."""

from __future__ import annotations

import threading
import time

from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.events import EventSink
from emergency_ckpt.tiers.persistent.probe import probe_storage
from emergency_ckpt.tiers.persistent.tier import PersistentTier

_END_TIMEOUT_S = 1.0


class StorageProbe:
    """One try of the persistent directory, for the process that leads the writers.

    Args:
      timeout_s: how long the try may take, from its beginning.
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
        """Try it now. Blocks for storage; PersistentTierError when saves could not use it."""
        deadline_s = time.monotonic() + self._timeout_s
        probe_storage(self._tier.storage, self._incarnation, deadline_s)

    def start(self) -> None:
        """Try it in the background; what fails is a warning. Does not block. Call once."""
        # A daemon: the interpreter's end must not wait for storage.
        self._thread = threading.Thread(target=self._warn, name="eckpt-probe", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Say nothing any more. Waits for a try under way, so that nothing of it is left behind.

        For a second at most. What is left then, a later start removes.
        """
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT_S)
        self._ended.set()

    def _warn(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - said; an unexpected one must not end in silence
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            if not self._ended.is_set():
                directory = self._tier.directory
                text = f"saves to {directory} would fail now, and will be tried: {kind}{error}"
                self._events.emit("start.warning", text=text)
