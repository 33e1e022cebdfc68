"""A file system that refuses a look, or fails at it for a moment, has not said what is there."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from persistent_steps import complete_steps
from world import LONG_S, STORAGE, World, same, save, save_all

from emergency_ckpt.errors import PersistentTierError, SaveFailed
from emergency_ckpt.storage import StorageDirectory

SHORT_S = 2.0


def before_looks(monkeypatch: pytest.MonkeyPatch, end: str, then: Callable[[str], object]) -> None:
    """Call ``then`` before each look for a path with this ``end``, or for a path below it."""

    def watched(look: Callable[..., Any]) -> Callable[..., Any]:
        def look_after(path: Any, *args: Any, **kwargs: Any) -> Any:
            if f"{path}/".endswith(f"{end}/") or f"{end}/" in str(path):
                then(str(path))
            return look(path, *args, **kwargs)

        return look_after

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))


def failing(code: int, times: int) -> Callable[[str], None]:
    left = iter(range(times))

    def fail(path: str) -> None:
        if next(left, None) is not None:
            raise OSError(code, os.strerror(code), path)

    return fail


def test_steps_that_may_not_be_looked_into_are_no_fresh_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain Orbax wrote them under names with a prefix, for another user alone."""
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt")
    like = {"w": np.zeros(3)}
    with ocp.CheckpointManager(world.persistent, options=options) as manager:
        manager.save(4, args=ocp.args.StandardSave({"w": np.ones(3)}))
    with monkeypatch.context() as patch, world.open_both(**STORAGE) as ckpt:
        before_looks(patch, "/ckpt_4", failing(errno.EACCES, 1_000_000))
        with pytest.raises(PersistentTierError, match="Permission denied"):
            ckpt.restore(state=like)
    with world.open_both(**STORAGE) as ckpt:
        step, state = ckpt.restore(state=like)
        assert (step, state["w"].tolist()) == (4, [1.0] * 3)


@pytest.mark.parametrize("nth", [1, 2])
def test_error_of_a_moment_takes_no_step_of_plain_orbax_away(
    world: World, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Orbax itself takes such an error for absence. The ``nth`` look for its document fails."""
    with ocp.CheckpointManager(world.persistent) as manager:
        for step in (2, 4):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step)}))
    looks = iter(range(1, 1_000_000))

    def fail(path: str) -> None:
        if next(looks) == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as patch, world.open_both(**STORAGE) as ckpt:
        before_looks(patch, "/persistent/4/default/_METADATA", fail)
        assert ckpt.restore(state={"w": np.zeros(3, np.int64)})[0] == 4
    assert next(looks) > nth


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_error_of_a_moment_takes_no_step_away(
    world: World, monkeypatch: pytest.MonkeyPatch, times: int, *, is_late: bool
) -> None:
    """``is_late``: the file server's listing is older than step 2, which is looked up by name."""
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 1, 2)
    world.lose_ram()
    names_in = StorageDirectory.names_in

    def late(own: StorageDirectory, below: str = "", deadline_s: float | None = None) -> set[str]:
        return names_in(own, below, deadline_s) - (set() if below else {"2"})

    with monkeypatch.context() as patch:
        if is_late:
            patch.setattr(StorageDirectory, "names_in", late)
        before_looks(patch, "/persistent/2", failing(errno.EIO, times))
        with world.open_both(**STORAGE) as ckpt:
            step, state = ckpt.restore(state=world.state(0))
            assert step == 2
            assert same(state, world.state(2))
            save_all(ckpt, world, 3)
    assert not world.named("persistent.removal")
    assert complete_steps(str(world.persistent)) == [1, 2, 3]


def test_look_at_the_place_of_a_step_has_a_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    limits = {"stall_timeout_s": SHORT_S, "total_timeout_s": 2 * SHORT_S}
    with world.open_both(**STORAGE, **limits) as ckpt:
        save_all(ckpt, world, 1)
        with monkeypatch.context() as patch:
            before_looks(patch, "/persistent/2", lambda _: answers.wait(LONG_S))
            assert save(ckpt, world, 2)
            began_s = time.monotonic()
            ckpt.wait_until_finished(LONG_S)
            assert time.monotonic() - began_s < LONG_S / 2
            answers.set()
        with pytest.raises(SaveFailed, match="no answer in time"):
            ckpt.check_for_errors()
        save_all(ckpt, world, 3)
    assert complete_steps(str(world.persistent)) == [1, 3]
