"""The recipes that took the place of commands: two steps compared, a step for plain Orbax."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from drains import Drains
from looks import eckpt_here
from places import ROOT

EXAMPLE = runpy.run_path(str(ROOT / "docs" / "examples" / "compare_steps.py"))
PAGE = (ROOT / "docs" / "inspection.md").read_text("utf-8")


def differing(*steps: tuple[Path, int]) -> dict[str, str]:
    return dict(EXAMPLE["differences"](*(EXAMPLE["leaves_of"](*step) for step in steps)))


def test_compare_steps_names_the_leaves_that_differ(drains: Drains, tmp_path: Path) -> None:
    drains.save(2, 4, save_every=2)
    stored = drains.world.persistent
    assert differing((stored, 2), (stored, 2)) == {}
    changed = {"['w']", "['step']", "['host']"}
    assert changed <= set(differing((stored, 2), (stored, 4)))
    with ocp.CheckpointManager(tmp_path / "plain") as manager:
        state = {"w": np.zeros(3), "more": np.zeros(1)}
        manager.save(2, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
    kinds = differing((stored, 2), (tmp_path / "plain", 2))
    assert kinds["['more']"] == "only in one step"
    assert kinds["['w']"] == "float32(8, 4) and float64(3,)"


def restored_by_orbax(directory: Path, step: int, like: Any) -> Any:
    with ocp.CheckpointManager(directory) as manager:
        assert manager.all_steps() == [step]
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        return manager.restore(step, args=args)["state"]


def test_copied_step_is_one_of_plain_orbax(drains: Drains, tmp_path: Path) -> None:
    drains.save(2, 4, save_every=2)
    shutil.copytree(drains.world.persistent / "4", tmp_path / "copy" / "4")
    state = restored_by_orbax(tmp_path / "copy", 4, drains.world.state(0))
    assert np.array_equal(state["w"], drains.world.state(4)["w"])


def test_step_in_ram_is_drained_into_a_new_directory(drains: Drains, tmp_path: Path) -> None:
    drains.save(2, save_every=2)
    drains.save(3)
    new = tmp_path / "new"
    places = ("--local-dir", drains.world.ramdisk, "--run-id", "run")
    assert eckpt_here("drain", "--dir", new, *places) == 0
    assert set(differing((new, 3), (drains.world.persistent, 2))) >= {"['step']"}
    assert (drains.world.persistent / "2").exists()
