"""JAX's devices and arrays as the simulated processes see them, over numpy memory.

Each process has one device. A leaf is split over the hosts of a slice or held whole by each. On
these devices memory given to an array is its buffer, as on CPU.
"""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import jax as real_jax
import numpy as np
import sim


class Device:
    """One device of one process."""

    platform = "cpu"
    device_kind = "simulated"

    def __init__(self, process_index: int, slice_index: int) -> None:
        self.id = process_index
        self.process_index = process_index
        self.slice_index = slice_index

    def memory_stats(self) -> None:
        return None

    def default_memory(self) -> Any:
        return SimpleNamespace(kind="device")

    def addressable_memories(self) -> list[Any]:
        return [self.default_memory()]

    def __hash__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __repr__(self) -> str:
        return f"device {self.id}"


class Shape:
    """Slices and hosts of one life of the job. ``slices``: process indices of each slice."""

    def __init__(self, slices: tuple[tuple[int, ...], ...]) -> None:
        self.slices = slices
        self.count = sum(len(members) for members in slices)
        slice_of = {p: number for number, members in enumerate(slices) for p in members}
        self.devices = [Device(p, slice_of[p]) for p in range(self.count)]
        self.position = {p: n for members in slices for n, p in enumerate(members)}
        self.per_slice = len(slices[0])


class Sharding(real_jax.sharding.Sharding):
    """Placement of a leaf: ``split`` over the hosts of a slice along its first axis, or whole."""

    def __init__(self, shape: Shape, split: bool) -> None:
        self.shape = shape
        self.split = split

    @property
    def memory_kind(self) -> str | None:
        return None

    @property
    def device_set(self) -> set[Any]:
        return set(self.shape.devices)

    @property
    def addressable_devices(self) -> set[Any]:
        return {self.shape.devices[sim.scheduler.here().process.index]}

    def devices_indices_map(self, global_shape: tuple[int, ...]) -> Any:
        found: dict[Any, tuple[slice, ...]] = {}
        for device in self.shape.devices:
            index = [slice(None)] * len(global_shape)
            if self.split:
                rows = global_shape[0] // self.shape.per_slice
                place = self.shape.position[device.process_index]
                index[0] = slice(place * rows, (place + 1) * rows)
            found[device] = tuple(index)
        return found

    def __hash__(self) -> int:
        return hash((id(self.shape), self.split))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sharding) and other.shape is self.shape and other.split == self.split
        )

    def __repr__(self) -> str:
        return f"Sharding(split={self.split})"


class Array:
    """The part of a global array that is on this process's device."""

    committed = True

    def __init__(self, shape: tuple[int, ...], sharding: Any, data: Any) -> None:
        self.shape = shape
        self.sharding = sharding
        self.local = data
        self.dtype = data.dtype

    @property
    def is_fully_replicated(self) -> bool:
        return not self.sharding.split

    @property
    def addressable_shards(self) -> list[Any]:
        return [SimpleNamespace(data=self.local)]

    def addressable_data(self, _index: int) -> Any:
        return self.local

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return True

    def copy_to_host_async(self) -> None: ...

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.local


def _device_put(blocks: Any, targets: Any, **_: Any) -> Any:
    return [
        Array(block.shape, target, block) for block, target in zip(blocks, targets, strict=True)
    ]


def _make_array(shape: Any, sharding: Any, arrays: Any, *, dtype: Any = None) -> Array:
    del dtype
    return Array(tuple(shape), sharding, arrays[0].local)


def _make_from_callback(shape: Any, sharding: Any, data_at: Any, *, dtype: Any = None) -> Array:
    del dtype
    (device,) = sharding.addressable_devices
    return Array(tuple(shape), sharding, data_at(sharding.devices_indices_map(shape)[device]))


def memory_of(value: Any) -> memoryview:
    """Return ``memoryview(value)``, which JAX refuses for an array with parts elsewhere."""
    if isinstance(value, Array):
        raise BufferError("an array with parts on other processes has no buffer")
    return memoryview(value)


def _shape() -> Shape:
    return sim.scheduler.here().process.globals["shape"]


def jax_module() -> ModuleType:
    """Return the module that stands for ``jax``."""
    module = ModuleType("jax")
    vars(module).update(vars(real_jax))
    vars(module).update(
        Array=Array,
        process_index=lambda: sim.scheduler.here().process.index,
        process_count=lambda: _shape().count,
        devices=lambda *_: _shape().devices,
        local_devices=lambda *_: [_shape().devices[sim.scheduler.here().process.index]],
        device_put=_device_put,
        make_array_from_single_device_arrays=_make_array,
        make_array_from_callback=_make_from_callback,
        block_until_ready=lambda value: value,
    )
    vars(module).pop("__getattr__", None)
    return module


@functools.lru_cache(maxsize=256)
def whole(tag: int, step: int) -> dict[str, Any]:
    """Return the global content of each leaf of the state that life ``tag`` has at ``step``.

    A different life has different bytes at the same step, so that a mixture of two shows.
    """
    rng = np.random.Generator(np.random.PCG64([tag, step]))
    return {
        "w": rng.integers(0, 255, (24, 3), np.uint8),
        "m": rng.standard_normal((24,)).astype(np.float32),
        "b": rng.standard_normal((5,)).astype(np.float32),
        "n": np.asarray(step * 1000 + tag, np.int32),
    }


SPLIT = {"w": True, "m": True, "b": False, "n": False}
"""The leaves, and which of them is split over the hosts of a slice."""


def state(shape: Shape, process_index: int, tag: int, step: int) -> dict[str, Any]:
    """Return the part of the state of one process as the product sees it."""
    found: dict[str, Any] = {}
    device = shape.devices[process_index]
    for name, value in whole(tag, step).items():
        sharding = Sharding(shape, SPLIT[name])
        index = sharding.devices_indices_map(value.shape)[device]
        part = np.ascontiguousarray(value[index]) if value.ndim else value
        part.flags.writeable = False
        found[name] = Array(value.shape, sharding, part)
    return found
