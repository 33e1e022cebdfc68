"""A file system that refuses a look, or fails at it for a moment, has not said what is there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from persistent_steps import complete_steps
from world import STORAGE, World, same, save_all

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage import StorageDirectory


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
