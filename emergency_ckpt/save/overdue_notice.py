"""A preemption notice on which the training loop does not act in time, as in a long evaluation.

A thread of each process looks once a second. After half of the grace period the thread, with those
of the other processes, brings RAM's newest step to storage, as at a good end (``last_step``).
Shortly before the period is over the thread reports that the present step is not saved, since the
process cannot report that after the kill.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from absl import logging

from emergency_ckpt.background import join
from emergency_ckpt.cluster.preemption import PreemptionWatch
from emergency_ckpt.core.save.overdue import Overdue, missed_text, overdue_work

_PAUSE_S = 1.0
_CLOSE_TIMEOUT_S = 5.0


class OverdueNotice:
    """Watches from its construction until ``close``.

    Args:
      bring: brings RAM's newest step to storage, until a time of ``time.monotonic``; called once.
      tell: reports the text of an error; called once.
      newest: returns the newest steps in RAM and in storage.
    """

    def __init__(
        self,
        watch: PreemptionWatch,
        grace_s: float,
        bring: Callable[[float], None],
        tell: Callable[[str], None],
        newest: Callable[[], tuple[int | None, int | None]],
        *,
        has_storage: bool,
    ) -> None:
        self._watch = watch
        self._grace_s = grace_s
        self._bring = bring
        self._tell = tell
        self._newest = newest
        self._has_storage = has_storage
        self._done = set[Overdue]()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eckpt-overdue", daemon=True)
        self._thread.start()

    @property
    def is_closing(self) -> bool:
        """Return whether the thread is to end its present work."""
        return self._stopping.is_set()

    def close(self, *, is_bad_end: bool = False) -> None:
        """End the thread; after a bad end, report the error that it would have reported.

        Idempotent.
        """
        self._stopping.set()
        join(self._thread, _CLOSE_TIMEOUT_S)
        since_s = self._watch.overdue_s
        if is_bad_end and since_s is not None:
            self._say(since_s)

    def _run(self) -> None:
        pause_s = min(_PAUSE_S, self._grace_s / 20)
        while self._watch.is_on and not self._stopping.wait(pause_s):
            since_s = self._watch.overdue_s
            work = "" if since_s is None else overdue_work(since_s, self._grace_s, self._done)
            if since_s is None or not work:
                continue
            if work == "tell":
                self._say(since_s)
                return
            self._done.add("bring")
            try:
                self._bring(time.monotonic() + self._grace_s - since_s)
            except Exception:  # noqa: BLE001 - logged; the notice's error must still be reported
                logging.exception("the newest step of RAM is not brought to storage")

    def _say(self, since_s: float) -> None:
        with self._lock:
            if "tell" in self._done:
                return
            self._done.add("tell")
        in_ram, stored = self._newest()
        text = missed_text(since_s, in_ram, stored, has_storage=self._has_storage)
        self._tell(text)
