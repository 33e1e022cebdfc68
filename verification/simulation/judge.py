"""The judgement on each life of a history: what must hold, and what must not have happened."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import oracle
import storage
from conformance import Conformance
from hosts import Host
from lives import Lives, Tags, life_of
from plan import SLOW_STORAGE_S, Life, Plan
from scheduler import Stuck

MOST_FILES_PER_HOST = 400
KEPT_IN_STORAGE = 2
LONG_CALL_S = 0.5
"""Where calls of storage take so long, a save to storage may take longer than a grace period."""
DUE_FOR_A_COMPLETE_SAVE = 4
"""Of so many due saves one is complete where writes take two of their intervals at the most."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Seen:
    """What one process did in one life."""

    restored: tuple[int, int] | None = None
    """(tag, step), or None while not restored."""
    returned: bool = False
    error: BaseException | None = None
    tier: str = ""
    """From which the step was restored."""
    complete: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    last_due: int | None = None
    """The last step saved after all faults had ended."""
    preempted: int | None = None
    """The step at which it acted on a notice of a preemption, whose save has ended."""
    has_missed: bool = False
    """It has told that the grace period ended before the save to storage."""
    has_gone_back: bool = False
    """It restored the step that the user named."""
    may_have_bound: bool = False
    """It has gone back, and its next save has begun: newer steps may not count any more."""
    has_bound: bool = False
    """It has begun that save: newer steps do not count for who finds its RAM."""
    refused: BaseException | None = None
    """Why it could not."""


class Judge:
    """Knows what was saved, and judges what was restored and what is left."""

    def __init__(
        self, plan: Plan, hosts: list[Host], storage: Path, log: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._hosts = hosts
        self._storage = storage
        self._log = log
        self._number = 0
        self._life = plan.lives[0]
        self.tags = Tags()
        """Incarnation -> the life that had it, whose number is in the bytes that it saves."""
        self.saved_by_tag: dict[int, set[int]] = {}
        self._lives = Lives(self.tags)
        self._dead: dict[tuple[int, int], set[int]] = {}
        """(tag, step) of a save that was rolled back -> the lives that did."""
        self._gone_on: dict[tuple[int, int], set[int]] = {}
        """(tag, step) of a save -> the lives that went on from it and saved."""
        self._bound: dict[int, set[int]] = {}
        """Life -> hosts whose RAM has its record of what was rolled back."""
        self._conformance = Conformance(storage)
        self._found = oracle.Holdings()
        self._stored_heads: set[str] = set()
        """The life whose record of what was rolled back storage's log has."""
        self._expected: oracle.Save | None = None
        self._expected_in_storage: oracle.Save | None = None
        self._stored_before: frozenset[oracle.Save] = frozenset()
        """The saves that storage had when this life began."""
        self.asked: int | None = None
        """The step that this life asks for, older than the newest; None: it does not, or cannot."""
        self._is_asked_whole = False

    @property
    def is_expected(self) -> bool:
        """Return whether there is a step that this life must restore, or a newer one."""
        return self._expected is not None

    def forget_host(self, number: int) -> None:
        """The host has lost its RAM."""
        for bound in self._bound.values():
            bound.discard(number)

    def before(self, number: int, life: Life, *, has_other_writer: bool) -> None:
        """Learn what this life must restore at the least.

        ``has_other_writer``: one of an earlier life may still save, and remove older steps.
        """
        self._number, self._life = number, life
        self._found = self._survey(life)
        stored = oracle.stored_saves(self._storage, self.tags)
        self._stored_before = frozenset(stored)
        in_reach = [] if _is_silent(life) else stored
        known = self._found.lives.union(name for name, _ in in_reach)
        self._lives.begin(number, known)
        self._stored_heads = self._heads_of_log()
        logged = oracle.logged_lives(self._storage)
        self._expected = oracle.newest_complete(self._found, self._lives, in_reach, stored, logged)
        self._expected_in_storage = oracle.newest_complete(
            oracle.Holdings(lives=self._found.lives), self._lives, stored, logged=logged
        )
        self._log(f"expected at least {self._expected}")
        newest = 0 if self._expected is None else self._expected[1]
        self.asked = newest - life.back if life.begins == "back" and newest > life.back else None
        reach = self._found.lives.union((name for name, _ in stored), logged)
        counting = [save for save in in_reach if self._lives.counts(save, reach)]
        kept = sorted(counting, key=lambda save: save[1])[-KEPT_IN_STORAGE:]  # others may be going
        kept = [] if has_other_writer else kept
        ram = [e for e in oracle.whole_saves(self._found) if self._lives.counts(e, reach)]
        self._is_asked_whole = self.asked in [step for _, step in (*ram, *kept)]

    def after(self, seen: list[Seen]) -> None:
        """Judge the life that has ended. Violation."""
        life = self._life
        for number in set(life.hosts):
            self._hosts[number].changed()
        self._judge_errors(life, seen)
        self._judge_preempted(life, seen)
        self._judge_slow_writes(life, seen)
        self._note_life(seen)
        restored = {each.restored for each in seen if each.returned}
        if len(restored) > 1:
            raise Violation(f"processes restored different steps: {restored}")
        if any(each.refused for each in seen) and self._is_asked_whole:
            raise Violation(f"step {self.asked} is whole, and was refused: {_refusal(seen)}")
        if restored and not any(each.has_gone_back for each in seen):
            tiers = {each.tier for each in seen if each.returned}
            self._judge_step(next(iter(restored)), "persistent" in tiers)
            if any(each.complete or each.stored for each in seen):
                for save in filter(None, restored):
                    self._gone_on.setdefault(save, set()).add(self._number)
        elif restored and {step for _, step in filter(None, restored)} != {self.asked}:
            raise Violation(f"restored {restored} in place of step {self.asked}")
        else:
            for save in filter(None, restored):
                self._dead.pop(save, None)  # the user has named it, so it counts again
        self._judge_ramdisks(life, seen)
        self._judge_left(life, next(iter(restored), None))

    def _heads_of_log(self) -> set[str]:
        """Return the life whose chain is in storage's log: it has rolled others back."""
        heads = oracle.logged_heads(self._storage)
        for head in heads:
            self.tags.setdefault(life_of(head), self._number)
        self._lives.binding |= heads
        return heads

    def _survey(self, life: Life | None = None) -> oracle.Holdings:
        """Return what all hosts hold, or those of ``life``."""
        numbers = range(len(self._hosts)) if life is None else sorted(set(life.hosts))
        return oracle.merged([self._hosts[number].holdings(self.tags) for number in numbers])

    def _judge_errors(self, life: Life, seen: list[Seen]) -> None:
        for each in seen:
            if isinstance(each.error, Violation | Stuck):
                raise each.error
            if each.error is not None and type(each.error).__module__ != "emergency_ckpt.errors":
                raise Violation(f"an untyped error: {each.error!r}") from each.error
        errors = [each.error for each in seen if each.error is not None]
        kinds = {type(error).__name__ for error in errors}
        is_lost = self._expected is None and kinds <= {"Unrecoverable", "RestoreFailed"}
        before = frozenset[oracle.Save]() if life.begins == "zero" else self._stored_before
        is_late = _is_grace_over(life, seen) and kinds == {"DeadlineExceeded"}
        forgiven = is_lost or is_late or are_of_taken_numbers(errors, before)
        if errors and life.is_calm and not forgiven:
            raise Violation(f"an error without a fault: {errors[0]}") from errors[0]
        full = [each for each in errors if "RamdiskFull" in str(each)]
        if full and "RestoreFailed" in kinds:
            raise Violation(f"a restore ended by a full ramdisk: {full[0]}") from full[0]
        if "Unrecoverable" in kinds and self._expected is not None:
            raise Violation(f"given up, although {self._expected} is whole: {errors[0]}")

    def _judge_preempted(self, life: Life, seen: list[Seen]) -> None:
        steps = {each.preempted for each in seen}
        acted = steps - {None}
        is_late = _is_grace_over(life, seen)
        if len(acted) > 1 or (acted and life.is_calm and len(steps) > 1 and not is_late):
            raise Violation(f"a notice of a preemption was acted on at different steps: {steps}")
        for each in seen:
            if life.is_calm and acted and not acted <= set(each.complete):
                raise Violation(f"step {acted} of a preemption was not saved: {each.complete}")
        stored = {step for each in seen for step in each.stored}
        if life.is_calm and self._plan.stored_every and not acted <= stored and not is_late:
            raise Violation(f"step {acted} of a preemption is not in storage: {stored}")

    def _judge_slow_writes(self, life: Life, seen: list[Seen]) -> None:
        """Slow writes leave saves out, and in each few one is complete."""
        if not life.writes_s or not life.is_calm:
            return
        due = life.steps // life.interval
        for each in seen:
            if len(each.complete) < due // DUE_FOR_A_COMPLETE_SAVE:
                raise Violation(f"of {due} saves only those of {each.complete} were complete")

    def _judge_step(self, restored: tuple[int, int] | None, from_storage: bool) -> None:
        tag, step = restored or (0, 0)
        saves = [(name, step) for name, its in self.tags.items() if its == tag]
        every_head = self._found.heads | self._stored_heads
        heads = every_head & self._lives.binding
        for killer in self._dead.get((tag, step), ()):
            is_bound = self._bound[killer] & set(self._life.hosts)
            is_on_another = any(self._lives.went_on_apart(s, killer, heads) for s in saves)
            # A later life may have gone on from it where nobody had the killer's record.
            gone_on = {n for n in self._gone_on.get((tag, step), ()) if n > killer}
            is_on_another |= any(self.tags.find(head) in gone_on for head in heads)
            if is_bound and not is_on_another:
                raise Violation(f"restored {restored}, which life {killer} had rolled back")
        stored = self._expected_in_storage
        if from_storage and stored is not None and restored and restored[1] < stored[1]:
            raise Violation(f"restored step {restored[1]} of storage, although {stored} is there")
        if self._expected is None:
            return
        if restored is None:
            raise Violation(f"nothing was restored, although {self._expected} is whole")
        if restored[1] < self._expected[1]:
            raise Violation(f"restored step {restored[1]}, although {self._expected} is whole")
        # A life may or may not learn what slow storage has.
        views = [every_head, *([self._found.heads] if _is_silent(self._life) else [])]
        if all(self._lives.is_rolled_back(save, view) for save in saves for view in views):
            raise Violation(f"restored {saves}, which was rolled back")

    def _note_rolled_back(self, life: Life, seen: list[Seen]) -> None:
        """Remember the saves that this life's first complete save has put out of the way."""
        bound = {
            life.hosts[number]
            for number, each in enumerate(seen)
            if each.complete or each.has_bound
        }
        restored = next((each.restored for each in seen if each.returned), None)
        if not bound or (restored is None and life.restores):
            return
        first = -1 if restored is None else restored[1]
        self._bound[self._number] = bound
        for tag, steps in self.saved_by_tag.items():
            if tag == self._number or not self._lives.knows(self._number, tag):
                continue
            for step in steps:
                if (tag, step) != restored and step >= first:
                    self._dead.setdefault((tag, step), set()).add(self._number)

    def _note_life(self, seen: list[Seen]) -> None:
        """Remember from where this life went on, and whether it rolled others back."""
        restored = next((each.restored for each in seen if each.returned), None)
        self._lives.go_on(self._number, restored, asked=self._life.restores)
        if any(each.complete or each.stored or each.may_have_bound for each in seen):
            mine = [name for name, tag in self.tags.items() if tag == self._number]
            self._lives.binding.update(mine[-1:])

    def _judge_ramdisks(self, life: Life, seen: list[Seen]) -> None:
        every = self._survey()
        if every.wrong:
            raise Violation(every.wrong[0])
        sound = [host.ram for host in self._hosts if not host.is_damaged]
        for path in every.torn:
            if any(ram in path.parents for ram in sound):
                raise Violation(f"{path} was published with other bytes than its CRCs")
        # One for the next save, one that a save to storage pins, two more of a restore.
        if every.most_slots > self._plan.keep_last_n + 1 + bool(self._plan.stored_every) + 2:
            raise Violation(f"{every.most_slots} slots in one directory")
        if every.files > MOST_FILES_PER_HOST * len(self._hosts):
            raise Violation(f"{every.files} files in RAM")
        for head in every.heads:
            self.tags.setdefault(life_of(head), self._number)  # killed before its first event
        self._lives.binding |= every.heads
        self._note_rolled_back(life, seen)
        known = [step for life, step in every.known if self.tags.find(life) == self._number]
        complete = max([*known, *(step for each in seen for step in each.complete)], default=None)
        whole = oracle.whole_saves(every)
        mine = [save for save in whole if self.tags.find(save[0]) == self._number]
        self._log(f"whole in RAM: {whole}; complete: {complete}")
        if complete is not None and (not mine or mine[-1][1] < complete):
            raise Violation(f"step {complete} was complete, and is no longer whole: {whole}")
        self._judge_stored(seen)
        for each in seen:
            if each.last_due is not None and each.last_due not in each.complete:
                raise Violation(f"no save was complete after the faults: not step {each.last_due}")
        if complete is not None:
            self._judge_copies(life, every, [save for save in mine if save[1] >= complete])

    def _judge_stored(self, seen: list[Seen]) -> None:
        self._heads_of_log()
        for path, data in storage.behaviour.created.items():
            is_there = os.path.exists(path) and path not in storage.behaviour.again
            if is_there and Path(path).read_bytes() != data:
                raise Violation(f"{path} was created by one writer, and changed by another")
        refused = self._conformance.follow(storage.behaviour.created)
        if refused:
            raise Violation(refused)
        stored = max((step for each in seen for step in each.stored), default=None)
        there = oracle.stored_saves(self._storage, self.tags)
        self._log(f"whole in storage: {there}; complete: {stored}")
        mine = [step for life, step in there if self.tags[life] == self._number]
        if stored is not None and max(mine, default=-1) < stored:
            raise Violation(f"step {stored} was complete in storage, and is not: {there}")

    def _judge_copies(self, life: Life, every: oracle.Holdings, saves: list[oracle.Save]) -> None:
        """One of ``saves``, the complete one or later, has as many copies as was asked for.

        A push of a host state may fail, and a killed process may not have come to it.
        """
        slices = len(life.slices)
        wanted = slices if slices <= 2 else slices - 1
        if self._plan.placement != "all_but_primary":
            wanted = min(2, slices)
        elements, states = max(oracle.copies(every, save) for save in saves)
        if elements < wanted or (life.is_calm and states < slices):
            raise Violation(f"{saves} have {elements} copies of a shard, {states} of a host state")

    def _has_begun_anew(self, newest: oracle.Save | None, whole: list[oracle.Save]) -> bool:
        """Return whether what a life without a restore has left in place of the rest is enough.

        It is a save of its own, or the newest that was known to be complete: no restore has told
        it of a newer one that nobody had heard of, and nobody has read the bytes of a known one
        that are damaged. The known one may be one that a life has left behind whose record nobody
        here has any more. ``whole``: what is left.
        """
        there, heads = oracle.whole_saves(self._found), self._found.heads
        known = [save for save in self._found.known if save in there]
        kept = [s for s in known if s in whole and not self._lives.is_rolled_back(s, heads)]
        own = newest is not None and self.tags[newest[0]] == self._number
        left = max([newest[1] if newest else -1, *(step for _, step in kept)])
        return own or left >= max((step for _, step in known), default=-1)

    def _judge_left(self, life: Life, restored: tuple[int, int] | None) -> None:
        """What was whole before this life still is, unless a newer step is: P4."""
        if self._expected is None:
            return
        found = self._survey(life)
        stored = oracle.stored_saves(self._storage, self.tags)
        newest = oracle.newest_complete(found, self._lives, stored)
        whole = oracle.whole_saves(found)
        if self._expected in [*whole, *stored] or (newest and newest[1] >= self._expected[1]):
            return
        if self.asked in [step for _, step in (*whole, *stored)]:
            return  # what came after it may be forgotten
        saves = [self._lives.maker_of(save) for save in whole]
        # Hosts that were absent may know of a later life, which this one had no part in.
        mine = [step for incarnation, step in whole if self.tags[incarnation] == self._number]
        least = self._expected[1] if self.asked is None else self.asked
        if restored in saves or max(mine, default=-1) >= least:
            return
        # What storage has, a life that does not reach it could not know.
        own = oracle.newest_complete(found, self._lives) if _is_silent(life) else newest
        if not life.restores and self._has_begun_anew(own, whole):
            return
        raise Violation(f"{self._expected} was whole before, now {newest} is the newest: {whole}")


_TAKEN = re.compile(r"/([0-9]+): the step of (\S+) there has the same number, and counts")


def are_of_taken_numbers(
    errors: Collection[BaseException], before: Collection[oracle.Save]
) -> bool:
    """Return whether each error refuses a save whose number a counting step of storage has.

    Such a save is refused, because only a chain that leaves the step behind frees its number. A
    life meets the step of another life if this life began without a restore, or if the other
    life's process still wrote then, so that the step came after the restore.

    Args:
      before: the saves that storage had when the life looked. The life had to go on from these, so
        their numbers are no excuse.
    """
    taken = [_TAKEN.search(str(error)) for error in errors]
    return all(match and (match[2], int(match[1])) not in before for match in taken)


def _refusal(seen: list[Seen]) -> BaseException | None:
    return next((each.refused for each in seen if each.refused), None)


def _is_grace_over(life: Life, seen: list[Seen]) -> bool:
    """Return whether calls of storage took so long that a grace period may be too short."""
    return life.storage_slow_s >= LONG_CALL_S and any(each.has_missed for each in seen)


def _is_silent(life: Life) -> bool:
    """Return whether a life may not learn what storage has."""
    slow = life.storage_slow_s > SLOW_STORAGE_S
    return bool(life.storage_faults or life.storage_gone or slow)
