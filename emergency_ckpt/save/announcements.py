"""The thread that announces the steps to save, at the leader, and reads them, at the others.

``DueSaves`` asks the schedules of the tiers and the announcements at each step.

The rules are ``core.save.announcements``. The training thread shares one small object in memory
with this thread, and never waits for it during a step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from absl import logging

from emergency_ckpt.background import Failures, off_training_thread, wait_for
from emergency_ckpt.cluster.coordination import (
    Coordinator,
    by_process,
    decode_each,
    decode_message,
    number_of,
)
from emergency_ckpt.cluster.round import Cell, Series
from emergency_ckpt.core.limits import MAX_INT
from emergency_ckpt.core.save.announcements import (
    LEAD_AT_FIRST_S,
    PROMPT_S,
    Announcement,
    Follower,
    Lead,
    Met,
    SaveReport,
    StepClock,
    before_first_step,
    poll_s,
)
from emergency_ckpt.errors import CheckpointError, CoordinationError, DeadlineExceeded, SaveFailed
from emergency_ckpt.save.schedule import Choice, TierSchedule
from emergency_ckpt.types import TierName

_JOIN_S = 2.0
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_LOOKS_PER_S = 5000.0
"""Reports that the leader reads in a second, of all processes together."""
_FAILED_PAUSE_S = 1.0
_POLLS_APART = 4
"""One in so many looks for the next announcement also looks for later announcements."""
_KEPT_KEYS = 128
"""Announcements that stay: a process is never so far behind in reading, unless it is stopped."""


Reports = dict[TierName, SaveReport]
Missed = Callable[[TierName, int], None]
"""Called with the tier and the step of a save for which this process is late; may block."""


class SaveAnnouncements:
    """The announcements from a restore, or from the start, to the next restore.

    ``arrive`` belongs to the training thread and never waits for other processes; ``tell_ended``
    belongs to the background threads of the saves, and ``stop`` to the owner of the object. The
    owner deletes the keys below ``name`` once all processes have stopped.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        tiers: Mapping[TierName, TierSchedule],
        failures: Failures,
        missed: Missed,
        *,
        timeout_s: float,
    ) -> None:
        """The thread starts with the first step.

        Args:
          name: the prefix of the keys, which no other ``SaveAnnouncements`` uses.
          timeout_s: how long the leader waits for the reports on a save, from the end of its own
            part of the save.
        """
        self._coordinator = coordinator
        self.name = name
        self._tiers = tiers
        self._failures = failures
        self._missed = missed
        self._timeout_s = timeout_s
        self._leads = coordinator.process_index == 0
        self._changed = threading.Condition()
        self._follower = Follower()
        self._reports: Reports = {tier: SaveReport() for tier in tiers}
        self._telling = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._next_number = 0
        # At the leader.
        self._clock = StepClock()
        self._newest: int | None = None
        self._lead = Lead(coordinator.process_count)
        self._prompt_until_s = -math.inf
        self._unpublished: Announcement | None = None
        self._heard: Reports = {tier: SaveReport() for tier in tiers}
        self._keys = Series(_KEPT_KEYS)
        # At the others.
        self._is_over = False
        self._looks = 0

    def arrive(self, step: int) -> frozenset[TierName]:
        """The training thread has reached ``step``; return the tiers that save it as announced."""
        now_s = time.monotonic()
        with self._changed:
            if self._leads:
                self._clock.arrive(step, now_s)
                self._newest = step
            reached = self._follower.arrive(step, now_s)
            for met in reached:
                self._note(met)
        self._start()
        return frozenset(met.announcement.tier for met in reached if met.announcement.tier)

    def expect(self, step: int) -> None:
        """Expect the step after ``step`` next, so that it can be announced before it comes."""
        with self._changed:
            self._newest = step
        self._start()

    def tell_ended(self, tier: TierName, step: int) -> None:
        """Report that this process's saves to ``tier`` up to ``step`` have ended.

        Blocks; never raises.
        """
        if self._leads:
            return
        stall_ms = _millis(self._tiers[tier].stall_s)
        with self._telling:  # else an older report could replace a newer one
            with self._changed:
                report = self._reports[tier]
                self._reports[tier] = msgspec.structs.replace(
                    report, ended=max(step, report.ended), stall_ms=stall_ms
                )
                data = msgspec.json.encode(self._reports)
            try:
                key = f"{self.name}/report/{self._coordinator.process_index}"
                self._coordinator.replace(key, data)
            except CheckpointError as error:
                logging.warning("the leader gets no report that a save has ended here: %s", error)

    def stop(self, wait_s: float = 0.0) -> None:
        """End the thread: the leader announces nothing more, the others read the list to its end.

        Until the leader has stopped too, the leader may announce steps that this process has
        passed, and all others would wait for this process. So this process waits for the leader's
        stop, at most ``wait_s``. Idempotent.
        """
        if self._thread is None:
            self._stopping.set()
            return
        if not self._leads and not self._stopping.is_set():
            with self._changed:
                wait_for(self._changed, lambda: self._is_over, wait_s)
        self._stopping.set()
        self._thread.join(_JOIN_S)

    def _start(self) -> None:
        if self._thread is None and not self._stopping.is_set():
            self._thread = threading.Thread(
                target=self._run, name="eckpt-announcements", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        turn = self._announce_due if self._leads else self._follow
        while not (self._stopping.is_set() or self._is_over):
            self._attempt(turn)
        if self._leads:
            self._attempt(self._publish_end)
        while not (self._leads or self._is_over) and self._attempt(self._read_next):
            pass

    def _attempt(self, turn: Callable[[], bool]) -> bool:
        try:
            return off_training_thread(turn)
        except Exception as error:  # noqa: BLE001 - recorded, raised by check_for_errors
            if not self._stopping.is_set():
                text = f"{type(error).__name__}: {error}"
                self._failures.record(SaveFailed("announce", "a step to save", text), cause=error)
                self._stopping.wait(_FAILED_PAUSE_S)
            return False

    # The leader.

    def _announce_due(self) -> bool:
        """Announce one step and return True. Where nothing is due, pause and return False."""
        self._publish()
        with self._changed:
            measured, newest = self._clock.progress, self._newest
        if measured is None and newest is None:
            self._stopping.wait(_LONGEST_PAUSE_S / 10)
            return False
        progress = measured or before_first_step(newest or 0, time.monotonic())
        pause_s = min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, progress.step_time_s / 4))
        for tier, schedule in self._tiers.items():
            others_save = self._others_save(tier, schedule)
            if others_save:
                pause_s = max(pause_s, self._coordinator.process_count / _LOOKS_PER_S)
            now_s = time.monotonic()
            lead_s = LEAD_AT_FIRST_S
            if measured is not None:
                lead_s = self._lead.seconds(is_prompt=now_s < self._prompt_until_s)
            first = progress.first_step(now_s, lead_s)
            choose = schedule.choose_first if measured is None else schedule.choose_step
            choice = choose(progress, first, lead_s, others_save=others_save)
            if choice is not None and self._announce(tier, choice):
                return True
        self._stopping.wait(pause_s)
        return False

    def _announce(self, tier: TierName, choice: Choice) -> bool:
        """Announce a step; return False where the training thread has reached the step already."""
        announcement = Announcement(self._next_number, tier, choice.step, choice.exact)
        with self._changed:
            if not self._follower.is_ahead(choice.step):
                return False
            self._follower.read(announcement, time.monotonic())
        self._next_number += 1
        self._tiers[tier].announced(choice.step)
        self._unpublished = announcement
        self._publish()
        return True

    def _publish(self) -> None:
        """Publish the announcement that this process acts on already. A failed try is repeated."""
        announcement = self._unpublished
        if announcement is None:
            return
        if self._coordinator.process_count > 1:
            key = self._key(announcement.number)
            Cell(self._coordinator, key).settle(msgspec.json.encode(announcement))
            self._prompt_until_s = time.monotonic() + 0.8 * PROMPT_S
            self._keys.add(key)
        self._unpublished = None
        self._keys.tidy(self._coordinator)

    def _publish_end(self) -> bool:
        self._publish()
        self._unpublished = Announcement(self._next_number, None)
        self._publish()
        return True

    def _others_save(self, tier: TierName, schedule: TierSchedule) -> bool:
        """Return whether other processes still save what this process has saved to ``tier``."""
        begun, ended_s = schedule.begun
        if begun <= self._heard[tier].ended or ended_s is None:
            return False
        reports = self._reports_of_others(tier)
        missing = self._coordinator.process_count - 1 - sum(r.ended >= begun for r in reports)
        if missing and time.monotonic() - ended_s < self._timeout_s:
            return True
        with self._changed:
            own = self._reports[tier]
        if own.number > self._heard[tier].number and self._lead.note(own, reports):
            schedule.announce_again(begun)
        self._heard[tier] = msgspec.structs.replace(own, ended=begun)
        schedule.note_stall(max((report.stall_ms for report in reports), default=0) / 1e3)
        return False

    def _reports_of_others(self, tier: TierName) -> list[SaveReport]:
        """Return the newest reports on ``tier``; a report that cannot be read delays no save."""
        name = f"{self.name}/report"
        values = by_process(self._coordinator.list(name), name, self._coordinator.process_count)

        def unreadable(text: str) -> Reports:
            self._failures.record(CoordinationError("read", name, text))
            return {tier: SaveReport(ended=MAX_INT)}

        every = decode_each(values, Reports, name, unreadable)
        return [reports[tier] for reports in every.values() if tier in reports]

    # The others.

    def _follow(self) -> bool:
        """Look for the next announcement; return whether there was one."""
        if self._looks == 0:
            self._looks = 1
            try:
                # Only once for each key: a ``get`` that runs into its deadline costs the service
                # memory.
                self._take(self._coordinator.get(self._key(self._next_number), PROMPT_S))
            except DeadlineExceeded:
                return False
            return True
        if self._read_next():
            return True
        self._looks += 1
        if self._looks % _POLLS_APART == 0:
            self._skip_deleted()
        self._stopping.wait(poll_s(self._coordinator.process_count))
        return False

    def _read_next(self) -> bool:
        data = self._coordinator.find(self._key(self._next_number))
        if data is not None:
            self._take(data)
        return data is not None

    def _skip_deleted(self) -> None:
        """Skip the announcements that were deleted while this process was stopped."""
        keys = self._coordinator.list(f"{self.name}/step")
        numbers = [number_of(text, f"{self.name}/step") for text in keys]
        later = [number for number in numbers if number > self._next_number]
        if later and self._next_number not in numbers:
            self._next_number = min(later)

    def _take(self, data: bytes) -> None:
        number, self._next_number, self._looks = self._next_number, self._next_number + 1, 0
        name = f"{self._key(number)}, process 0"
        announcement: Announcement = decode_message(data, Announcement, name)
        tier = announcement.tier
        if announcement.number != number or not (tier is None or tier in self._tiers):
            problem = "its number or its tier is another one"
            raise CoordinationError("decode", f"message {name!r}", problem)
        late: Met | None = None
        with self._changed:
            if tier is None:
                self._is_over = True
                self._changed.notify_all()
            else:
                late = self._follower.read(announcement, time.monotonic())
            if late is not None:
                self._note(late)
        if tier is not None and late is not None:
            self._missed(tier, late.step)
            self.tell_ended(tier, late.step)

    # All.

    def _note(self, met: Met) -> None:
        """Note an announcement for the next report. The caller holds ``_changed``."""
        tier = met.announcement.tier
        if tier is not None:
            self._reports[tier] = msgspec.structs.replace(
                self._reports[tier], number=met.announcement.number, spare_ms=_millis(met.spare_s)
            )

    def _key(self, number: int) -> str:
        return f"{self.name}/step/{number}"


def _millis(seconds: float) -> int:
    """Return ``seconds`` in ms, rounded down: a process that is late by under 1 ms stays late."""
    return math.floor(1000 * seconds)


class DueSaves:
    """Asks schedules and announcements once for each step. For the training thread.

    Attributes:
      announced: the tiers in which the last step was due by an announcement alone: another process
        may have read that too late.
    """

    def __init__(
        self,
        schedules: Mapping[TierName, TierSchedule],
        coordinator: Coordinator,
        failures: Failures,
        missed: Missed,
        *,
        timeout_s: float,
    ) -> None:
        """``missed``, ``timeout_s``: as of ``SaveAnnouncements``."""
        self._schedules = schedules
        self._coordinator = coordinator
        self._failures = failures
        self._missed = missed
        self._timeout_s = timeout_s
        self._inspected: int | None = None
        self._due = set[TierName]()
        self.announced: frozenset[TierName] = frozenset()
        self._announcements = self._begin_announcements(0)

    @property
    def name(self) -> str:
        """The prefix of the keys of the present announcements; empty where no tier has any."""
        return "" if self._announcements is None else self._announcements.name

    def _begin_announcements(self, number: int) -> SaveAnnouncements | None:
        tiers: dict[TierName, TierSchedule] = {
            name: s for name, s in self._schedules.items() if s.plan.is_announced
        }
        if not tiers:
            return None
        announcements = SaveAnnouncements(
            self._coordinator,
            f"announced/{number}",
            tiers,
            self._failures,
            self._missed,
            timeout_s=self._timeout_s,
        )
        for name, schedule in tiers.items():
            schedule.begin_reports(partial(announcements.tell_ended, name))
        return announcements

    def inspect(self, step: int, *, preempted: bool) -> bool:
        """Return whether a save is due at ``step``; ``take`` then says the same."""
        if self._inspected != step:
            announced = self._announcements.arrive(step) if self._announcements else frozenset()
            by_rule = {
                name
                for name, schedule in self._schedules.items()
                if schedule.is_due(step, preempted=preempted)
            }
            self.announced = frozenset(announced - by_rule)
            self._due, self._inspected = by_rule | announced, step
        return bool(self._due)

    def take(self, step: int, *, force: bool, preempted: bool) -> list[TierName]:
        """Return the tiers in which a save is due.

        ``force``: in all tiers that have not gone on behind ``step``.
        """
        self.inspect(step, preempted=preempted)
        self._inspected = None
        return [
            name
            for name, schedule in self._schedules.items()
            if name in self._due or (force and (schedule.is_behind(step) or step == schedule.last))
        ]

    def expect(self, step: int) -> None:
        """Expect the step after ``step`` next, after a restore. On all processes; never waits."""
        if self._announcements is not None:
            self._announcements.expect(step)

    def stop(self, wait_s: float = 0.0) -> None:
        """Announce nothing more. As ``SaveAnnouncements.stop``."""
        if self._announcements is not None:
            self._announcements.stop(wait_s)

    def start_again(self, number: int) -> None:
        """End the announcements, where ``stop`` has not, and announce anew after a restore.

        ``number``: of restores so far, which all processes count alike, whatever became of them.
        """
        self.stop()
        self._announcements = self._begin_announcements(number)
        self._inspected = None
