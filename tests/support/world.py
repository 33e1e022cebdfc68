"""A world of one process: its directories, its states, its checkpointers."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from buffered import with_buffers
from configs import config_with
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mounts import mount_tmpfs, unmount

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.events import Event

LONG_S = 60.0


class World:
    """Directories of one test and the checkpointers that use them.

    Attributes:
      more: what the states have besides, by step.
    """

    def __init__(self, root: Path) -> None:
        self.ramdisk = root / "ram"
        self.persistent = root / "persistent"
        self.events: list[Event] = []
        self.mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("slice", "fsdp"))
        self.more: Callable[[int], dict[str, Any]] = lambda _: {}

    def open(
        self, *, buffers: Buffers | None = None, stores_newest: bool = False, **settings: Any
    ) -> EmergencyCheckpointer:
        """Open it. Most tests want storage as a crash leaves it: without RAM's newest step."""
        defaults: dict[str, Any] = {
            "run_id": "run",
            "local_dir": str(self.ramdisk),
            "local_save_every": 1,
            "save_every": 0,
            "mesh": self.mesh,
            "start_timeout_s": 2 * LONG_S,
            "save_timeout_s": LONG_S,
            "storage_wait_timeout_s": LONG_S,  # a slow disk must not cost a save
            "on_event": self.events.append,
        }
        kind = with_buffers(buffers or Buffers(), stores_newest=stores_newest)
        return kind(config_with({**defaults, **settings}))

    def open_both(self, **settings: Any) -> EmergencyCheckpointer:
        both = {"dir": str(self.persistent), "save_every": 2}
        return self.open(**{**both, **settings})

    def state(self, step: int) -> dict[str, Any]:
        def put(value: np.ndarray, *spec: Any) -> jax.Array:
            return jax.device_put(value, NamedSharding(self.mesh, P(*spec)))

        return {
            "w": put(np.arange(32, dtype=np.float32).reshape(8, 4) + step, "fsdp"),
            "empty": put(np.zeros((0, 4), np.float32)),
            "step": put(np.int32(step)),
            "host": step,
            **self.more(step),
        }

    def restores(
        self,
        step: int | None,
        *,
        host: bool = False,
        asked: int | None = None,
        by: EmergencyCheckpointer | None = None,
        **settings: Any,
    ) -> Any:
        """Check that a restore finds ``step`` as it was saved; return the state.

        Arguments:
          host: with the host state that ``save_all`` gave it.
          asked: the step that the restore names, if it names one.
          by: who restores, where that is not a life of its own with these ``settings``.
        """
        position: dict[str, int] | None = {} if host else None
        with contextlib.nullcontext(by) if by else self.open_both(**settings) as life:
            found, state = life.restore(asked, state=self.state(0), host_state=position)
        assert found == step
        assert not host or position == ({} if step is None else {"at": step})
        assert step is None or same(state, self.state(step))
        return state

    def lose_ram(self) -> None:
        """Remove what RAM has; a life that only reads has left nothing there.

        A job that lives reserves slots in the background, and may make or remove a file meanwhile.
        """
        while self.ramdisk.exists():
            try:
                shutil.rmtree(self.ramdisk)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                    raise

    def each_tier(self) -> Iterator[str]:
        """Name the tier that a restore reads; all RAM is lost before the second."""
        yield "local"
        self.lose_ram()
        yield "persistent"

    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def named(self, name: str, **fields: object) -> list[Event]:
        """Return the events of this name that have these fields."""
        return [
            each
            for each in list(self.events)
            if each.name == name and fields.items() <= each.fields.items()
        ]

    def wait_for(self, name: str, **fields: object) -> None:
        """Wait until an event of this name has these fields."""
        deadline_s = time.monotonic() + LONG_S
        while not self.named(name, **fields):
            assert time.monotonic() < deadline_s, (name, fields, self.names())
            time.sleep(0.005)

    def versions(self) -> list[Path]:
        """The files of the step log, oldest first."""
        return sorted((self.persistent / "host_state" / "log").glob("*.json"))


@contextlib.contextmanager
def small_tmpfs(path: Path, size_bytes: int) -> Iterator[None]:
    """A ramdisk of its own, where this may be mounted."""
    path.mkdir(parents=True)
    if not mount_tmpfs(path, size_bytes):
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        yield
    finally:
        unmount(path)


class _Lines(logging.Handler):
    """Keeps what this package logs, as text, without the level."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "/emergency_ckpt/" in record.pathname:  # Orbax uses the same logger
            self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the log records of INFO or above."""
    logger, handler = logging.getLogger("absl"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def same(left: Any, right: Any) -> bool:
    """Return whether the states are the same, bit for bit."""
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        type(a) is type(b) and _bits(a) == _bits(b)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def _bits(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.dtype, array.shape, array.tobytes()


@contextlib.contextmanager
def storage_lacks(step: int, why: str = "") -> Iterator[None]:
    """Expect that a life ends with the error of its last save to storage, of ``step``."""
    match = f"the save of step {step} to storage failed: .*{re.escape(why)}"
    with pytest.raises(SaveFailed, match=match):
        yield


def finish(checkpointer: EmergencyCheckpointer) -> None:
    """Wait for all that is being saved; raise what failed."""
    checkpointer.wait_until_finished()
    checkpointer.check_for_errors()


def save_all(checkpointer: EmergencyCheckpointer, world: World, *steps: int) -> None:
    for step in steps:
        assert checkpointer.save(step=step, state=world.state(step), host_state={"at": step})
        checkpointer.wait_until_finished()
    checkpointer.check_for_errors()


def save(checkpointer: EmergencyCheckpointer, world: World, step: int, **settings: Any) -> bool:
    return checkpointer.save(
        step=step, state=world.state(step), host_state={"at": step}, **settings
    )


def check_restored(world: World, step: int | None) -> None:
    """A restore finds ``step`` whole, host state included: with RAM, and from storage alone."""
    for _ in world.each_tier():
        world.restores(step, host=True)


SECRET = "9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f"
OTHER_SECRET = "37e5a8c90d6b41f2b8127c5ed49306aa6f81e0359bd4c7127a60fe8d2b95c34e"
STORAGE: dict[str, Any] = {"save_every": 1, "local_save_every": 0}
"""Settings of a job that saves to storage alone."""


def persist(world: World, *steps: int, start: int | None = None, **settings: Any) -> None:
    """A life that saves to storage alone, after a restore of ``start`` if that is given."""
    with world.open_both(**{**STORAGE, **settings}) as ckpt:
        if start is not None:
            ckpt.restore(start, state=world.state(0))
        save_all(ckpt, world, *steps)


def restored(world: World, step: int | None = None, **settings: Any) -> int | None:
    """A life that restores, with the bytes that were saved; the step, None without one."""
    with world.open_both(**{**STORAGE, **settings}) as ckpt:
        found, state = ckpt.restore(step, state=world.state(0))
        assert found is None or same(state, world.state(found))
        return found
