"""The two faces of plain Orbax by one name for each call, for what holds for both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import grain.python as grain
import jax
import orbax.checkpoint as plain_v0
import orbax.checkpoint.experimental.v1 as plain_v1
from world import World

import emergency_ckpt.orbax.checkpoint as our_v0
import emergency_ckpt.orbax.v1 as our_v1


def state(world: World, step: int) -> dict[str, Any]:
    """The state of a step, without the array that Orbax cannot write."""
    return {name: leaf for name, leaf in world.state(step).items() if name != "empty"}


def target(world: World) -> Any:
    """What a loop knows of its state before it has one."""

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(spec, state(world, 0))


class Positioned:
    """The part of a data iterator that Orbax v1 asks for: it keeps ``at`` in a file of its own."""

    at: int

    async def save(self, directory: Any) -> Any:
        text = str(self.at)

        async def write() -> None:
            folder = await directory.await_creation()
            (folder / "at").write_text(text)

        return write()

    async def load(self, directory: Any) -> Any:
        async def read() -> None:
            self.at = int((directory / "at").read_text())

        return read()


class Position(Positioned):
    """A data iterator that Orbax, v0 and v1, and RAM can keep.

    Attributes:
      states: gives another state than the position: may raise, and may be nothing RAM can keep.
    """

    def __init__(self, at: int = 0, states: Callable[[], Any] | None = None) -> None:
        self.at, self.states = at, states

    def get_state(self) -> Any:
        return str(self.at).encode() if self.states is None else self.states()

    def set_state(self, state: bytes) -> None:
        self.at = int(state)


def no_state() -> Any:
    """Raise, as an iterator may whose worker is busy."""
    raise RuntimeError("no state here")


class _Face:
    """The calls that have one name in both."""

    own: Any

    def reload(self) -> None:
        self.own.reload()

    def delete(self, step: int) -> None:
        self.own.delete(step)

    def close(self) -> None:
        self.own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class V0(_Face):
    """Of plain Orbax; ``is_ours`` False is Orbax's own class."""

    def __init__(
        self,
        directory: Path,
        stores: int = 100,
        *,
        ram: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        is_ours: bool = True,
    ) -> None:
        given: dict[str, Any] = {}
        if is_ours:
            given = {"local_directory": ram, "settings": settings or {}}
        module: Any = our_v0 if is_ours else plain_v0
        options = module.CheckpointManagerOptions(save_interval_steps=stores, **given)
        self.own = module.CheckpointManager(directory, options=options)

    def save(self, step: int, state: Any, data: Any = None, *, force: bool = False) -> bool:
        items = {"state": plain_v0.args.StandardSave(state)}
        if data is not None:
            items["data"] = grain.PyGrainCheckpointSave(data)
        return self.own.save(step, args=plain_v0.args.Composite(**items), force=force)

    def load(self, step: int | None, target: Any, data: Any = None) -> Any:
        items = {"state": plain_v0.args.StandardRestore(target)}
        if data is not None:
            items["data"] = grain.PyGrainCheckpointRestore(data)
        return self.own.restore(step, args=plain_v0.args.Composite(**items)).state

    def latest(self) -> int | None:
        return self.own.latest_step()

    def stored(self) -> list[int]:
        """Return the steps of storage."""
        return list(self.own.all_steps())

    def wait(self) -> None:
        self.own.wait_until_finished()


class V1(_Face):
    """Of Orbax v1; ``is_ours`` False is Orbax's own class."""

    def __init__(
        self,
        directory: Path,
        stores: int = 100,
        *,
        ram: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        is_ours: bool = True,
    ) -> None:
        policy = plain_v1.training.save_decision_policies.FixedIntervalPolicy(stores)
        given: dict[str, Any] = {"local_directory": ram, "settings": settings} if is_ours else {}
        training: Any = our_v1.training if is_ours else plain_v1.training
        self.own = training.Checkpointer(directory, save_decision_policy=policy, **given)

    def save(self, step: int, state: Any, data: Any = None, *, force: bool = False) -> bool:
        items = {"state": state} if data is None else {"state": state, "data": data}
        return self.own.save_checkpointables(step, items, force=force)

    def load(self, step: int | None, target: Any, data: Any = None) -> Any:
        items = {"state": target} if data is None else {"state": target, "data": data}
        return self.own.load_checkpointables(step, items)["state"]

    def latest(self) -> int | None:
        newest = self.own.latest
        return None if newest is None else newest.step

    def stored(self) -> list[int]:
        """Return the steps of storage."""
        newest = self.latest()
        ours = set() if newest is None or self._is_in_storage(newest) else {newest}
        return [each.step for each in self.own.checkpoints if each.step not in ours]

    def _is_in_storage(self, step: int) -> bool:
        return (Path(self.own.directory) / str(step)).exists()

    def wait(self) -> None:
        self.own.wait()


FACES: dict[str, Any] = {"v0": V0, "v1": V1}
