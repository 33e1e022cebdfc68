"""The beats of processes that wait for each other in long work, and the events about the work.

A beat is a report of progress: a thread of each process at the work sends a beat every quarter of
the stall limit, to one key for each process, which it replaces. Short work sends no beat. A process
that waits looks at the beats of those that it waits for, so a wait lasts as long as they make
progress and no longer (``core.stall.BeatLog``).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from absl import logging

from emergency_ckpt.background import join
from emergency_ckpt.cluster.coordination import Coordinator, by_process, decode_message
from emergency_ckpt.core.stall import BeatLog, ProcessWork, TimeLimits, slowest
from emergency_ckpt.errors import CheckpointError, DeadlineExceeded
from emergency_ckpt.work_progress import WorkProgress

_TOLD_S = 30.0
_ASKED_ALONE = 2
_LEAVE_S = 10.0


_Beat = tuple[int, ProcessWork]
"""The number of a process's beat, and the work that the beat reports."""


class Beats:
    """While inside, sends this process's beats in one piece of work, and reads the others' beats.

    RuntimeError at the beginning where no thread can be started.

    Args:
      name: of the keys; the leader deletes them once all have left the work.
      tell: called about every 30 s with the fields of an event.
      is_leader: the leader looks at the beats of all, and so can name the slowest process.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        progress: WorkProgress,
        limits: TimeLimits,
        tell: Callable[[dict[str, Any]], None],
        *,
        is_leader: bool,
    ) -> None:
        self.name = name
        self._coordinator = coordinator
        self._progress = progress
        self._limits = limits
        self._tell = tell
        self._is_leader = is_leader
        self._log = BeatLog(limits, progress.clock.now_s())
        self._lock = threading.Lock()
        self._looked_s = -math.inf
        self._told_s = time.monotonic()
        self._has_told = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eckpt-beats", daemon=True)

    def __enter__(self) -> Beats:
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._progress.clock)
            self._log = BeatLog(self._limits, self._progress.clock.now_s())
            self._told_s = time.monotonic()
            self._thread.start()
            entered.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._progress.clock.__exit__(*raised)
        # Wait, since a beat after the leader's deletion would stay; not long, since the service may
        # hang.
        join(self._thread, _LEAVE_S)
        if self._has_told:
            self._tell(_fields(ProcessWork(doing="over")))

    def all_came(self, processes: Collection[int]) -> None:
        """Note that ``processes`` have begun the work, as an answer to all of them shows."""
        with self._lock:
            self._log.came(processes, self._progress.clock.now_s())

    def check(self, processes: Collection[int]) -> None:
        """Look now and then at the processes that this process waits for.

        DeadlineExceeded names those that are stuck. While none is, the wait counts as progress of
        this process's own work.
        """
        now_s = time.monotonic()
        others = sorted(set(processes) - {self._coordinator.process_index})
        if now_s - self._looked_s >= self._limits.beat_s / 2:
            self._looked_s = now_s
            self._look(others)
        with self._lock:
            stuck = self._log.stuck(others, self._progress.clock.now_s())
        if stuck:
            named = list(stuck)[:4]
            raise DeadlineExceeded(
                "wait for",
                self.name,
                "; ".join(stuck[process] for process in named),
                missing=[f"process {process}" for process in stuck],
                hint="look at the logs of these processes",
            )
        self._progress.touch()

    def _look(self, processes: Collection[int]) -> None:
        if len(processes) <= _ASKED_ALONE:
            answers = {p: self._coordinator.find(f"{self.name}/{p}") for p in processes}
            beats = {p: data for p, data in answers.items() if data is not None}
        else:
            listed = self._coordinator.list(self.name)
            beats = by_process(listed, self.name, self._coordinator.process_count)
        now_s = self._progress.clock.now_s()
        with self._lock:
            for process, data in beats.items():
                what = f"{self.name}/{process}"
                number, work = decode_message(data, _Beat, what)
                self._log.note(process, number, work, now_s)

    # The thread.

    def _run(self) -> None:
        number = 0
        while not self._ended.wait(self._limits.beat_s):
            number += 1
            try:
                self._beat(number)
            except CheckpointError as error:
                logging.warning("the others get no report how far this process is: %s", error)
            if time.monotonic() - self._told_s >= min(_TOLD_S, self._limits.stall_s / 2):
                self._told_s = time.monotonic()
                self._tell_progress()

    def _beat(self, number: int) -> None:
        me, count = self._coordinator.process_index, self._coordinator.process_count
        if count == 1:
            return
        beat = msgspec.json.encode((number, self._progress.work))
        self._coordinator.replace(f"{self.name}/{me}", beat)
        if self._is_leader:
            self._look([process for process in range(count) if process != me])

    def _tell_progress(self) -> None:
        work = self._progress.work
        fields = _fields(work)
        if self._is_leader:
            with self._lock:
                works = {self._coordinator.process_index: work, **self._log.works}
            last = slowest(works)
            if last is not None:
                fields["slowest"] = last
                fields["slowest_bytes_left"] = works[last].left_bytes
                fields["slowest_bytes_per_second"] = round(works[last].rate)
        self._has_told = True
        self._tell(fields)


def _fields(work: ProcessWork) -> dict[str, Any]:
    return {
        "doing": work.doing,
        "bytes_done": work.done_bytes,
        "bytes_left": work.left_bytes,
        "bytes_per_second": round(work.rate),
    }
