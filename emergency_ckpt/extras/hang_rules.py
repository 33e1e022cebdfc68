"""The decision that a job hangs, and which process fell behind. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from emergency_ckpt.core.wording import processes_text

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
