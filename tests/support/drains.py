"""A run whose RAM is drained: its saves, the command, and what a restore then finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from looks import Tree, eckpt_here, tree_of
from world import World, same


class Position:
    """An iterator's state, as a restore gives it back: ten times the step."""

    def __init__(self) -> None:
        self.at = -1

    def get_state(self) -> int:
        return self.at

    def set_state(self, at: int) -> None:
        self.at = at


class Drains:
    """The run ``run`` of a world of one process, and drains of its RAM in this process."""

    def __init__(self, world: World, capsys: pytest.CaptureFixture[str]) -> None:
        self.world, self._capsys = world, capsys

    def save(self, *steps: int, **settings: Any) -> None:
        """Start the job, save steps to RAM alone unless ``settings`` say more, and end it."""
        position = Position()
        with self.world.open_both(**{"save_every": 0, **settings}) as ckpt:
            for step in steps:
                position.at = 10 * step
                ckpt.save(step=step, state=self.world.state(step), host_state=position)
                ckpt.wait_until_finished()
            ckpt.check_for_errors()

    def words(self, *more: str, local_dir: Path | None = None) -> list[str]:
        """Return the command line of a drain."""
        ram = local_dir or self.world.ramdisk
        return [
            "drain",
            "--dir",
            str(self.world.persistent),
            "--local-dir",
            str(ram),
            *more,
        ]

    def drain(self, *more: str, local_dir: Path | None = None) -> tuple[int, dict[str, Any]]:
        """Return the exit status and the outcome of a drain that finds something to say."""
        code = eckpt_here(*self.words("--json", *more, local_dir=local_dir))
        out = self._capsys.readouterr()
        assert out.out, out.err
        return code, json.loads(out.out)

    def refused(self, *more: str) -> tuple[int, str]:
        """Return the exit status and the message of a drain that does not begin."""
        code = eckpt_here(*self.words(*more))
        out = self._capsys.readouterr()
        assert not out.out
        return code, out.err

    def restored(self, **settings: Any) -> tuple[int | None, int]:
        """Restore, from both tiers; return the step and the position of the iterator."""
        position = Position()
        with self.world.open_both(**settings) as ckpt:
            step, state = ckpt.restore(state=self.world.state(-1), host_state=position)
        assert step is None or same(state, self.world.state(step))
        return step, position.at

    def restored_from_storage(self, **settings: Any) -> tuple[int | None, int]:
        """Lose all RAM, and restore."""
        self.world.lose_ram()
        return self.restored(**settings)

    def stored(self) -> Tree:
        """Return every name and byte in storage."""
        return tree_of(self.world.persistent)

    def copy_of_ram(self, name: str = "kept") -> Path:
        """Return a copy of the ramdisk, as of a host that leaves now."""
        kept = self.world.ramdisk.with_name(name)
        shutil.copytree(self.world.ramdisk, kept)
        return kept
