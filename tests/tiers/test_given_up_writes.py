"""Storage answers after a write was given up: what it then does must not show as a step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils.epath import backend
from state_samples import mesh_of, sharded

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.tiers.persistent import PersistentTier
from emergency_ckpt.tiers.snapshot import SnapshotRecipe
from emergency_ckpt.tiers.state_tree import BoxTable, describe
from emergency_ckpt.types import SaveId

TIMEOUT_S = 5.0
LONG_S = 60.0


def write_tensors(tier: PersistentTier, step: int) -> None:
    state = {"w": sharded(np.full((8, 4), step, np.float32), mesh_of(2, 4), ("x", "y"))}
    tree = describe(state, "save")
    shards = BoxTable(tree, 1).shards_of(0)
    on_host = SnapshotRecipe(tree, shards).take(jax.tree_util.tree_leaves(state)).collect()
    save = SaveId(step=step, incarnation="life", run_id="run")
    tier.write_tensors(save, tree, dict(zip(shards, on_host, strict=True)), (0,))


def stall(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> threading.Event:
    """Calls of these ``names`` for the temporary folder of step 4 wait for the event."""
    answers = threading.Event()

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            if "/4.orbax" in str(path):
                answers.wait(LONG_S)
            return call(self, path, *args, **kwargs)

        return wait_and_call

    kind = type(backend.os_backend)
    for name in names:
        monkeypatch.setattr(kind, name, slow(getattr(kind, name)))
    return answers


@pytest.mark.parametrize("names", [("mkdir", "makedirs"), ("rename", "replace")])
def test_a_write_that_was_given_up_does_not_come_through_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    tier = PersistentTier(str(tmp_path / "run"))
    tier.create()
    write_tensors(tier, 2)
    answers = stall(monkeypatch, names)
    with pytest.raises(PersistentTierError, match="no answer in time"):
        write_tensors(PersistentTier(tier.directory, timeout_s=TIMEOUT_S), 4)
    (given_up,) = (t for t in threading.enumerate() if t.name.startswith("eckpt-storage"))
    answers.set()
    given_up.join(LONG_S)
    assert not given_up.is_alive()
    assert os.listdir(tier.directory) == ["2"]
    write_tensors(tier, 4)
    assert sorted(os.listdir(tier.directory)) == ["2", "4"]
