"""Specs of arrays, the current mesh, and a dict of its own kind."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

_meshes: list[jax.sharding.Mesh] = []


@contextlib.contextmanager
def current_mesh(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Inside, specs have shardings."""
    _meshes.append(mesh)
    try:
        with mesh:
            yield
    finally:
        _meshes.pop()


@dataclasses.dataclass
class TensorSpec:
    """An array to come: ``shape`` may be a list, ``dtype`` one of ``jax.numpy``'s scalar types."""

    shape: Sequence[int]
    dtype: Any = None
    mesh_axes: Any = None
    memory_kind: str | None = None

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Only where there is a mesh."""
        axes = jax.sharding.PartitionSpec() if self.mesh_axes is None else self.mesh_axes
        return jax.sharding.NamedSharding(_meshes[-1], axes, memory_kind=self.memory_kind)


@jax.tree_util.register_pytree_with_keys_class
class VDict(dict[str, Any]):
    """A dict that is a node of its own kind, with its keys in order."""

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        keys = tuple(sorted(self))
        return [(jax.tree_util.DictKey(key), self[key]) for key in keys], keys

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], values: Sequence[Any]) -> VDict:
        return cls(zip(keys, values, strict=True))
