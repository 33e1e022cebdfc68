"""What lives do in storage, and what may be there afterwards. All calls of the product are here.

A ``State`` says which steps count, and the value that each has: a save of ``value`` stores an array
and a host state that are made of it. An operation leads through ``stages``; one that was stopped
has come to one of them. A second actor's ``effect`` comes on top.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import numpy as np
import orbax.checkpoint as ocp
from persistent_steps import RUN_ID, life, save_over, write_tensors, writer_of

from emergency_ckpt.core.timeline import continued
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage import DirectoryWriter, PersistentTier
from emergency_ckpt.storage import directory as storage_directory
from emergency_ckpt.storage.calls import THREAD_NAME, LateChanges
from emergency_ckpt.types import SaveId

State = dict[int, int]
PARENT = SaveId(10, life(1), RUN_ID)
LEFT = SaveId(20, life(1), RUN_ID)
LONG_S, HASTY_S = 900.0, 1.0


class Here:
    """One life in one directory. ``timeout_s``: after which it gives up a call of storage."""

    def __init__(self, url: str, number: int, *, nonce: str = "a", **settings: Any) -> None:
        self.tier = PersistentTier(url, timeout_s=settings.pop("timeout_s", LONG_S))
        self.life = life(number, nonce)
        self.writer: DirectoryWriter = writer_of(
            self.tier, settings.pop("run_id", RUN_ID), **settings
        )

    def begin(self, parent: SaveId | None = None) -> None:
        """Claim the directory and clear it, as the first save of a life does."""
        chain = parent and continued(None, parent, self.life)
        self.writer.begin(self.life, chain)

    def save(self, step: int, value: int, parent: SaveId | None = None, **more: Any) -> None:
        chain = parent and continued(None, parent, self.life)
        save_over(self.tier, step, value, self.life, chain=chain, writer=self.writer, **more)

    def remove(self, step: int) -> None:
        self.writer.remove([step], self.life)


def save_as_plain(url: str, step: int, value: int) -> None:
    with ocp.CheckpointManager(url) as manager:
        manager.save(step, args=ocp.args.StandardSave({"w": np.full(4, value)}))


# What was there before.


def _whole(url: str) -> State:
    here = Here(url, 1)
    here.save(10, 10)
    here.save(20, 20)
    return {10: 10, 20: 20}


def _unfinished(url: str) -> State:
    here = Here(url, 1)
    here.save(10, 10)
    here.tier.write_document(20, 0, 1, b"{}")
    write_tensors(here.tier, LEFT, 20)
    return {10: 10}


def _hidden(url: str) -> State:
    """Life 2 went back to step 10, and saved nothing."""
    _whole(url)
    Here(url, 2).begin(PARENT)
    return {10: 10}


def _with_another_tier(url: str) -> State:
    Here(_other_tier(url), 1).save(30, 32)
    return _whole(url)


def _other_tier(url: str) -> str:
    return f"{url.rpartition('/')[0]}/other-tier"


def _plain(url: str) -> State:
    Here(url, 1).save(10, 10)
    save_as_plain(url, 20, 20)
    Here(url, 1).writer.adopt()
    return {10: 10, 20: 20}


def _foreign(url: str) -> State:
    Here(url, 1).save(10, 10)
    save_as_plain(url, 25, 25)
    return {10: 10}


def _empty(url: str) -> State:
    Here(url, 1).tier.create()
    return {}


# Operations.


@dataclass(frozen=True)
class Operation:
    """What a life does.

    Attributes:
      before: makes the directory as it is before; returns its state.
      number: of the life.
      work: of that life, with what is added to each value that it saves.
      stages: states through which it leads, after that of before, with that addition.
      hidden: steps that do not count before or after, and are read by their numbers until they go.
      looks: it takes in what is there when it looks, also after a second actor.
    """

    before: Callable[[str], State]
    number: int
    work: Callable[[Here, int], object]
    stages: Callable[[State, int], list[State]]
    hidden: tuple[int, ...] = ()
    looks: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def _retention(here: Here, more: int) -> None:
    here.save(30, 32 + more)
    here.remove(10)


def _roll_back(here: Here, more: int) -> None:
    here.begin(PARENT)
    here.save(15, 35 + more, PARENT)


def _drain(here: Here, _: int) -> None:
    """Write a step of another tier, in the name of the life that has ended."""
    here.tier.writer = here.writer
    here.writer.find()
    url, timeout_s = _other_tier(here.tier.directory), here.tier.storage.timeout_s
    here.tier.publish(PersistentTier(url, timeout_s=timeout_s).open_step(30), life(1))


def _claim(here: Here, _: int) -> None:
    """A start, which takes a number, and the claim before the first change."""
    here.writer.find()
    here.writer.enter(here.life, here.tier.storage.deadline_s(None))
    here.writer.hold(here.life)


def _discard(here: Here, _: int) -> None:
    here.writer.remove_hidden([(20, life(1))], here.life)


def _anew(value: int) -> Callable[[State, int], list[State]]:
    """Step 20 is rolled back, and saved anew."""
    return lambda _, more: [{10: 10}, {10: 10, 20: value + more}]


def _adds(step: int, value: int) -> Callable[[State, int], list[State]]:
    return lambda state, more: [{**state, step: value + more}]


OPERATIONS: dict[str, Operation] = {
    "save": Operation(_whole, 2, lambda h, m: h.save(30, 32 + m), _adds(30, 32)),
    "first_save": Operation(_empty, 2, lambda h, m: h.save(30, 32 + m), _adds(30, 32)),
    "save_again": Operation(_whole, 2, lambda h, m: h.save(20, 22 + m, PARENT), _anew(22)),
    "save_over_plain": Operation(_plain, 2, lambda h, m: h.save(20, 22 + m, PARENT), _anew(22)),
    "save_over_hidden": Operation(_hidden, 3, lambda h, m: h.save(20, 23 + m), _adds(20, 23)),
    "remove": Operation(_whole, 2, lambda h, _: h.remove(20), lambda s, _: [_without(s, 20)]),
    "retention": Operation(
        _whole, 2, _retention, lambda s, m: [{**s, 30: 32 + m}, {20: 20, 30: 32 + m}]
    ),
    "roll_back": Operation(
        _whole, 2, _roll_back, lambda _, m: [{10: 10}, {10: 10, 15: 35 + m}], hidden=(20,)
    ),
    "drain": Operation(
        _with_another_tier,
        1,
        _drain,
        lambda s, _: [{**s, 30: 32}],
        settings={"writer": "drain-0"},
    ),
    "clean_up": Operation(_unfinished, 2, lambda h, _: h.begin(), lambda s, _: [s]),
    "claim": Operation(_whole, 2, _claim, lambda s, _: [s]),
    "adopt": Operation(
        _foreign, 2, lambda h, _: h.writer.adopt(), lambda s, _: [{**s, 25: 25}], looks=True
    ),
    "discard": Operation(_hidden, 3, _discard, lambda s, _: [s]),
}


def _without(state: State, step: int) -> State:
    return {each: value for each, value in state.items() if each != step}


# Second actors.


@dataclass(frozen=True)
class Actor:
    """Who comes while the first life is stopped.

    Attributes:
      mode: how the first life is stopped. ``late``: it gives its call up, which goes on later.
        ``old_listings``: it goes on to its end, but the actor's listings are of this point.
      act: what it does, in this directory, beside the life of this number.
      effect: on the state, where it had no error.
      saves: the step that it saves to the end.
      foreign: as another program, so that its step counts only where the log names none yet.
      fences: the first life may save no more.
      may_fail: with an error of ours.
    """

    mode: Literal["end", "hold", "lose", "late", "old_listings"]
    act: Callable[[str, int], object] = lambda *_: None
    effect: Callable[[State], State] = lambda state: state
    saves: int | None = None
    foreign: bool = False
    fences: bool = False
    may_fail: bool = False
    places: tuple[str, ...] = ("disk", "bucket")


def _again(work: Callable[[], object]) -> None:
    """Try a second time after a place was taken meanwhile: the next save clears it."""
    try:
        work()
    except PersistentTierError:
        work()


def _newer_life(url: str, _: int) -> None:
    """Go back to step 10 and save 20 again."""
    here = Here(url, 4)
    _again(lambda: here.save(20, 41, PARENT))


def _newer_life_dies(url: str, _: int) -> None:
    """The same, but end before the commit of step 20."""

    def die(point: str) -> None:
        if point == "checked":
            raise PersistentTierError("save", "step 20", "this life has ended")

    here = Here(url, 4)
    with contextlib.suppress(PersistentTierError):
        here.save(20, 41, PARENT, at=die)


def _newer_life_beside(url: str, _: int) -> None:
    here = Here(url, 4)
    _again(lambda: here.save(35, 45))


def _many_lives(url: str, _: int) -> None:
    """So that the version after the one that the first life has read is removed again."""
    for number in range(4, 16):
        Here(url, number).writer.hold(life(number))
    Here(url, 16).save(35, 45)


def _twin(url: str, number: int) -> None:
    """A life with the number of the first, which knew nothing of it."""
    Here(url, number, nonce="f").save(35, 45)


def _older_life(url: str, _: int) -> None:
    """A process of a life before, which hung and wakes up to save."""
    Here(url, 1, nonce="f").save(35, 45)


def _other_run(url: str, _: int) -> None:
    """As a user tells it to, who takes the first life for dead."""
    Here(url, 5, writer="adopt").writer.adopt("other")
    Here(url, 5, run_id="other").save(35, 45)


def _stranger(url: str, _: int) -> None:
    """Another run, which nobody told to."""
    Here(url, 5, run_id="other").save(35, 45)


def _goes_back(state: State) -> State:
    return {step: value for step, value in state.items() if step <= PARENT.step} | {20: 41}


def _is_cut_short(state: State) -> State:
    """The rollback is on record before the save goes on, where it is over a step that counts."""
    return {step: state[step] for step in state if step <= PARENT.step} if 20 in state else state


def _beside(state: State) -> State:
    return {**state, 35: 45}


ACTORS: dict[str, Actor] = {
    "nobody": Actor("end"),
    "lost_reply": Actor("lose", places=("bucket",)),
    "newer_life": Actor("hold", _newer_life, _goes_back, saves=20, fences=True),
    "newer_life_dies": Actor("hold", _newer_life_dies, _is_cut_short, fences=True),
    "newer_life_beside": Actor("hold", _newer_life_beside, _beside, saves=35, fences=True),
    "many_lives": Actor("hold", _many_lives, _beside, saves=35, fences=True),
    "twin": Actor("hold", _twin, _beside, saves=35, may_fail=True),
    "older_life": Actor("hold", _older_life, _beside, saves=35, may_fail=True),
    "other_run": Actor("hold", _other_run, _beside, saves=35, fences=True),
    "stranger": Actor("hold", _stranger, _beside, saves=35, may_fail=True),
    "plain_orbax": Actor("hold", lambda url, _: save_as_plain(url, 40, 48), saves=40, foreign=True),
    "late_answer": Actor("late"),
    "late_answer_to_newer_life": Actor("late", _newer_life, _goes_back, saves=20, fences=True),
    "late_listing": Actor(
        "old_listings", _newer_life_beside, _beside, saves=35, fences=True, places=("disk",)
    ),
}


@contextlib.contextmanager
def in_another_process() -> Iterator[None]:
    """Without what this process knows of calls that it has given up."""
    with mock.patch.object(storage_directory, "LATE_CHANGES", LateChanges()):
        yield


def late_calls() -> list[threading.Thread]:
    """Calls of storage that go on, given up or not."""
    return [each for each in threading.enumerate() if each.name.startswith(THREAD_NAME)]


def error_of(work: Callable[[], object]) -> Exception | None:
    """Return the error of ``work``; whether it is a named one is for the oracle to say."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - of any type
        return error
    return None
