"""Hangs: a job that makes no step any more ends by itself, with status 124, for its engine.

``on_event=HangWatch(600)``, or the text ``"hang(600)"``, alike on all processes.

1. ``observer.StepProgress`` holds the last step of this process and the call of ours that it is in.
2. Each process publishes its progress in the background, and reads that of the others when it
   stands still; ``decision_on_hang`` decides. The first decision is every process's.
3. Each process dumps all stacks and ends; the one that hosts the coordination service last.

A process that is stopped, or whose native code holds the interpreter's lock, cannot end itself: the
others name it and end, and the engine kills it. No thread here is the training thread. All calls of
the coordination service are in one thread, and another one, which calls nothing, ends the process
even when that service has stopped too.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from absl import logging

from emergency_ckpt.cluster.coordination import (
    by_process,
    deadline_left_s,
    decode_each,
    decode_message,
)
from emergency_ckpt.cluster.round import Cell, Round, nobody
from emergency_ckpt.core.wording import processes_text
from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.events import EventSink
from emergency_ckpt.observer import AtStep, JobView, Observer

HANG_EXIT_CODE = 124
"""Exit status of every process of a job that hangs, as of timeout(1)."""
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_PLACE_LIMIT_CHARS = 200
_STACKS_LIMIT_CHARS = 64 << 10
_REASON_LIMIT_CHARS = 1000
_LISTED_AT_MOST = 64

_AT, _DECISION = "hang/at", "hang/decision"
_SEEN, _LEFT = "hang/seen", "hang/left"
_SERVICE_PROCESS = 0
_SHORTEST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
_PARTS_OF_TIMEOUT = 8
_CALLS_PER_S = 500.0
_REPORT_TIMEOUT_S = 10.0
_DECIDED_CLOSE_TIMEOUT_S = 120.0
_NAMED_AT_MOST = 8


class ProcessProgress(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The progress of one process, as it publishes it and as the process that decides knows it.

    Attributes:
      step: last step that it has finished; None before the first one after a start or a restore.
      place: the line of the program at which its training thread is, empty where it is not known.
      call: the method of the checkpointer that it is in, empty outside.
      still_s: seconds, by its own clock, since its last step or since it entered or left ``call``.
      call_limit_s: longest time for which ``call`` may wait for a checkpoint.
      has_left: it has ended its checkpointer.
      beat: rises each time that it is published.
      is_silent: nothing has come from its background thread for a while, or ever. Each process
        decides that itself of the others.
    """

    step: int | None = None
    call: str = ""
    still_s: float = 0.0
    call_limit_s: float = 0.0
    place: str = ""
    has_left: bool = False
    beat: int = 0
    is_silent: bool = False


class HangDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision on a hang. That the job hangs, all processes are told.

    Attributes:
      behind: the processes that the others wait for; empty where the job does not hang.
      reason: in words for people.
      is_silence: those behind sent nothing, so nothing can be expected of them.
    """

    is_hang: bool
    behind: tuple[int, ...]
    reason: str
    is_silence: bool = False


def decide_hang(progress: Mapping[int, ProcessProgress], timeout_s: float) -> HangDecision:
    """Decide, for a process that has made no step for ``timeout_s``, whether the job hangs.

    The job does not hang while a process that the others may wait for still starts (compiles,
    restores), has moved within ``timeout_s``, or waits for a checkpoint, which has deadlines of its
    own.

    Args:
      progress: of every process of the job.
    """
    there = {p: report for p, report in sorted(progress.items()) if not report.has_left}
    silent = [p for p, report in there.items() if report.is_silent]
    if silent:
        last = ", ".join(_step_text(there[p]) for p in silent[:_NAMED_AT_MOST])
        reason = f"{processes_text(silent)} sent nothing; last: {last}"
        return HangDecision(True, tuple(silent), reason, is_silence=True)
    starting = [p for p, report in there.items() if report.step is None]
    if starting or not there:
        text = f"{processes_text(starting)} has not made its first step"
        return HangDecision(False, (), text if starting else "all processes have left")
    lowest = min(report.step for report in there.values() if report.step is not None)
    behind = [p for p, report in there.items() if report.step == lowest]
    why_not = _reason_against(there, behind, timeout_s)
    if why_not:
        return HangDecision(False, (), why_not)
    odd = _odd_ones(there, behind)
    if odd:
        reason = (
            f"{_behind_text(there, behind, lowest)}; {processes_text(odd)} at {there[odd[0]].place}"
        )
        rest = sorted({there[p].place for p in behind} - {there[odd[0]].place})
        return HangDecision(True, odd, f"{reason}, the others at {rest[0]}")
    return HangDecision(True, tuple(behind), _behind_text(there, behind, lowest))


def _reason_against(
    there: Mapping[int, ProcessProgress], behind: Sequence[int], timeout_s: float
) -> str:
    moving = [p for p in behind if there[p].still_s < timeout_s]
    if moving:
        return f"{processes_text(moving)} moved within {timeout_s:g} s"
    waiting = [p for p in behind if there[p].call and there[p].still_s < there[p].call_limit_s]
    if waiting:
        return f"{processes_text(waiting)} is in the checkpointer's {there[waiting[0]].call}"
    return ""


def _odd_ones(there: Mapping[int, ProcessProgress], behind: Sequence[int]) -> tuple[int, ...]:
    """Return the few of ``behind`` that are at another line than the rest; empty without such.

    All are at one step when one cannot begin the next and the others wait in its collectives.
    """
    by_place: dict[str, list[int]] = {}
    for process in behind:
        by_place.setdefault(there[process].place, []).append(process)
    groups = sorted(by_place.values(), key=len)
    few = len(groups) > 1 and 2 * len(groups[0]) < len(behind) and len(groups[0]) < len(groups[1])
    return tuple(groups[0]) if few else ()


def _behind_text(there: Mapping[int, ProcessProgress], behind: Sequence[int], lowest: int) -> str:
    still_s = max(there[p].still_s for p in behind)
    calls = sorted({there[p].call for p in behind} - {""})
    where = f", in the checkpointer's {' and '.join(calls)}" if calls else ""
    if len(behind) == len(there):
        text = f"all processes stand at step {lowest}{where}, for {still_s:.1f} s"
        places = {report.place for report in there.values()} - {""}
        if len(there) == 2 and len(places) == 2:
            at = " and ".join(f"process {p} at {report.place}" for p, report in there.items())
            text += f", {at}"
        return text
    highest = max(report.step or 0 for report in there.values())
    text = f"{processes_text(behind)} fell behind: at step {lowest}{where} for {still_s:.1f} s"
    return f"{text}, others at step {highest}"


def _step_text(report: ProcessProgress) -> str:
    step = "before its first step" if report.step is None else f"step {report.step}"
    return f"{step}, in the checkpointer's {report.call}" if report.call else step


_UNKNOWN = ProcessProgress()


def _place_of(thread: int) -> str:
    """Return the line of the program at which ``thread`` is, with its function.

    The innermost line that is of no library, or of all lines where each is of a library.
    """
    innermost = frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    while frame and frame.f_code.co_filename.startswith((*_LIBRARIES, _PACKAGE, "<")):
        frame = frame.f_back
    shown = frame or innermost
    if shown is None:
        return ""
    code = shown.f_code
    text = f"{Path(code.co_filename).name}:{shown.f_lineno} in {code.co_name}"
    return text[:_PLACE_LIMIT_CHARS]


def _end_after(timeout_s: float) -> None:
    time.sleep(timeout_s)
    os._exit(HANG_EXIT_CODE)


def _report(events: EventSink, behind: str, reason: str) -> None:
    text = f"the job hangs, so this process ends with status {HANG_EXIT_CODE}: {reason}"
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read(_STACKS_LIMIT_CHARS).decode(errors="replace")
    os.write(2, f"{text}\n{stacks}\n".encode(errors="replace"))
    if logging.get_absl_handler().python_handler.stream not in (sys.stderr, sys.__stderr__):
        logging.error("%s\n%s", text, stacks)
    else:
        logging.error("%s", text)
    events.emit("hang.found", behind=behind, reason=reason, stacks=stacks)
    events.close()
    logging.flush()


class _Watch:
    """Watches one process, and through the coordination service all of them.

    It begins at the first step after a start or a restore, so neither compilation nor a restore
    counts. From then on each process must make a step within ``timeout_s``.
    """

    def __init__(self, job: JobView, timeout_s: float) -> None:
        self._progress = job.progress
        self._coordinator = coordinator = job.coordinator
        self._events = job.events
        self._timeout_s = timeout_s
        part_s = min(max(timeout_s / _PARTS_OF_TIMEOUT, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        self._pause_s = max(part_s, 2 * coordinator.process_count / _CALLS_PER_S)
        self._silence_s = max(4 * self._pause_s, timeout_s / 2 - self._pause_s)
        self._beat = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._inspection_began_s: float | None = None
        self._why_not = ""
        self._inspections_without_answer = 0
        self._cell = Cell(coordinator, _DECISION)
        self._decided: HangDecision | None = None
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="eckpt-hang-steps", daemon=True),
            threading.Thread(target=self._guard, name="eckpt-hang", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching, and tell the others that this process makes no more steps. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        # An error of the training thread, such as a collective that fails, may be the hang's.
        limit_s = 1.0 if self._decided is None else _DECIDED_CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(limit_s)

    def _run(self) -> None:
        while not self._stopping.wait(self._pause_s):
            try:
                self._round()
                self._inspections_without_answer = 0
            except CheckpointError as error:
                logging.warning("the steps of the other processes are not known: %s", error)
        try:
            self._publish(has_left=True)
        except CheckpointError as error:
            # The service has ended too, so no process is left to read it.
            logging.info("leaving without telling the other processes: %s", error)

    def _round(self) -> None:
        mine = self._publish(has_left=False)
        data = self._cell.find()
        if data is None and mine.step is not None and mine.still_s > self._timeout_s / 2:
            data = self._inspect(mine)
        elif data is None:
            self._seen.clear()
            self._inspection_began_s = None
        if data is not None:
            self._decided = decode_message(data, HangDecision, _DECISION)

    def _publish(self, *, has_left: bool) -> AtStep:
        self._beat += 1
        now = self._progress.read()
        # Only where it is asked for: the frames of all threads are looked up for it.
        place = _place_of(self._progress.thread) if now.still_s > self._timeout_s / 2 else ""
        at = ProcessProgress(
            now.step,
            now.call,
            now.still_s,
            now.call_limit_s,
            place=place,
            has_left=has_left,
            beat=self._beat,
        )
        self._coordinator.replace(
            f"{_AT}/{self._coordinator.process_index}", msgspec.json.encode(at)
        )
        return now

    def _inspect(self, mine: AtStep) -> bytes | None:
        """Return the decision that the job hangs, as sent to all processes; None while it does not.

        The other processes are observed for ``_silence_s`` first: until then no process is known to
        be silent, and a job that was paused as a whole has gone on.
        """
        coordinator = self._coordinator
        rows = by_process(coordinator.list(_AT), _AT, coordinator.process_count)
        reports = decode_each(rows, ProcessProgress, _AT, lambda _: _UNKNOWN)
        now_s = time.monotonic()
        progress: dict[int, ProcessProgress] = {}
        for process in range(coordinator.process_count):
            at = reports.get(process, _UNKNOWN)
            if self._seen.get(process, (-1, 0.0))[0] != at.beat:
                self._seen[process] = at.beat, now_s
            is_silent = now_s - self._seen[process][1] >= self._silence_s
            place = at.place[:_REASON_LIMIT_CHARS]
            progress[process] = msgspec.structs.replace(at, place=place, is_silent=is_silent)
        if self._inspection_began_s is None:
            self._inspection_began_s = now_s
        if now_s - self._inspection_began_s <= self._silence_s or mine.still_s <= self._timeout_s:
            return None
        return self._publish_decision(decide_hang(progress, self._timeout_s))

    def _publish_decision(self, decision: HangDecision) -> bytes | None:
        if not decision.is_hang:
            if decision.reason != self._why_not:
                self._why_not = decision.reason
                text = "no step for %g s, which is no hang: %s"
                logging.warning(text, self._timeout_s, decision.reason)
            return None
        decided = msgspec.structs.replace(
            decision,
            behind=decision.behind[:_LISTED_AT_MOST],
            reason=decision.reason[:_REASON_LIMIT_CHARS],
        )
        return self._cell.settle(msgspec.json.encode(decided))

    def _guard(self) -> None:
        while not self._stopping.wait(self._pause_s):
            self._inspections_without_answer += 1
            if self._decided is None:
                self._decided = self._silent_service()
            if self._decided is not None:
                break
        if self._decided is not None:
            self._end(self._decided)

    def _end(self, decided: HangDecision) -> None:
        """Report the hang and end this process. Never returns; nothing is flushed but the report.

        The collectives of the others fail when a process ends, and they would end by that error: so
        this process waits for them first.
        """
        wait_s = 8 * self._pause_s
        limit_s = time.monotonic() + wait_s
        # A listener, a log or the service may hang just as the job does.
        threading.Thread(target=_end_after, args=[_REPORT_TIMEOUT_S + wait_s], daemon=True).start()
        try:
            _report(self._events, ", ".join(map(str, decided.behind)), decided.reason)
            self._meet(decided, limit_s)
        except BaseException:  # noqa: BLE001 - the process ends, whatever the report comes to
            logging.exception("the report of a hang is not complete")
        finally:
            os._exit(HANG_EXIT_CODE)

    def _silent_service(self) -> HangDecision | None:
        """Return a decision of this process alone, where the others cannot be asked."""
        mine = self._progress.read()
        # By looks and not by the clock, which goes on while this process is stopped.
        silence_s = self._inspections_without_answer * self._pause_s
        limit_s = max(self._timeout_s, self._silence_s)
        if mine.step is None or mine.still_s <= self._timeout_s or silence_s <= limit_s:
            return None
        reason = (
            f"process {_SERVICE_PROCESS}, which runs the coordination service, has not answered for"
            f" {silence_s:.1f} s; this process is at step {mine.step}"
        )
        return HangDecision(True, (_SERVICE_PROCESS,), reason, is_silence=True)

    def _meet(self, decided: HangDecision, limit_s: float) -> None:
        """Return when all processes that can know of the decision do; process 0 after the others.

        The coordination service ends with process 0. ``limit_s``: of ``time.monotonic``.
        """
        silent = set(decided.behind) if decided.is_silence else set[int]()
        if _SERVICE_PROCESS in silent:
            return
        members = sorted(set(range(self._coordinator.process_count)) - silent)
        seen, left = (
            Round(
                self._coordinator,
                name,
                deadline_left_s(limit_s),
                members=members,
                absent=nobody,
                prompt=True,
            )
            for name in (_SEEN, _LEFT)
        )
        try:
            seen.hold(b"", seen.when_all(lambda _: b""))
            left.say(b"")
            if self._coordinator.process_index == _SERVICE_PROCESS:
                left.hear(left.when_all(lambda _: b""))
        except CheckpointError as error:
            logging.warning("not all processes have seen that the job hangs: %s", error)


class HangWatch(Observer):
    """Ends a job that makes no step: all processes dump their stacks and end with status 124.

    Args:
      timeout_s: maximum time without a step, after the first step of each process. All processes
        should be given the same; where they differ, the shortest decides.

    Raises:
      ConfigError: ``timeout_s`` is no finite time above 0.
    """

    def __init__(self, timeout_s: float) -> None:
        if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError([f"a hang watch needs a finite time above 0 s, not {timeout_s!r}"])
        self._timeout_s = timeout_s
        self._watches: dict[JobView, _Watch] = {}

    def join(self, job: JobView) -> None:
        """Start to watch."""
        self._watches[job] = _Watch(job, self._timeout_s)

    def leave(self, job: JobView) -> None:
        """Stop watching."""
        watch = self._watches.pop(job, None)
        if watch is not None:
            watch.close()


def from_text(argument: str) -> HangWatch:
    """Return the watch of the text ``"hang(<seconds>)"``. ConfigError: no such time."""
    try:
        return HangWatch(float(argument))
    except ValueError as error:
        raise ConfigError([f"hang({argument!r}): the argument is a number of seconds"]) from error
