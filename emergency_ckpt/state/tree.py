"""The training state as leaves, boxes and processes, from JAX's description of it."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from emergency_ckpt.core.boxes import whole
from emergency_ckpt.core.limits import MAX_DIMENSIONS, MAX_PATH_CHARS
from emergency_ckpt.core.placement import HeldLeaves
from emergency_ckpt.core.restore.leaves import PYTHON_NUMBERS
from emergency_ckpt.core.restore.plan_types import Targets
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES, shards_by_set
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.types import Box, LeafSpec, ShardId

PyTree = Any
Device = Any
TreeDef = Any

_REMEMBERED_KINDS = 1024
"""Shardings and shapes whose boxes are kept."""

_NUMBERS: dict[type, str] = {
    kind: f"Python {kind.__name__}" for kind in (bool, int, float, complex)
}
"""Ordered, because a bool is an int too."""
assert set(_NUMBERS.values()) == set(PYTHON_NUMBERS)


class LeafKind(enum.Enum):
    """The type of the user's leaf, which a restore must return."""

    ARRAY = "array"
    KEYS = "keys"  # a PRNG key array
    NUMPY = "numpy"
    SCALAR = "scalar"  # a Python bool, int, float or complex


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a state.

    Attributes:
      spec: the stored form.
      kind: the type that the user sees.
      number: for a Python number its key in ``PYTHON_NUMBERS``; otherwise empty.
      sharding: placement of the stored array (key data for PRNG keys); None for host values.
      position: index in the pytree's flattening order.
    """

    spec: LeafSpec
    kind: LeafKind
    sharding: jax.sharding.Sharding | None
    position: int
    number: str = ""


@dataclasses.dataclass(frozen=True)
class StateTree:
    """A described state: its leaves sorted by path, and the pytree's structure."""

    leaves: tuple[Leaf, ...]
    treedef: TreeDef

    @property
    def specs(self) -> dict[str, LeafSpec]:
        """The leaf specs by path."""
        return {leaf.spec.path: leaf.spec for leaf in self.leaves}

    @property
    def wanted(self) -> dict[str, LeafSpec]:
        """Return ``specs`` of a state to restore into, Python numbers as ``PYTHON_NUMBERS``."""
        return {
            leaf.spec.path: msgspec.structs.replace(leaf.spec, dtype=leaf.number or leaf.spec.dtype)
            for leaf in self.leaves
        }

    def unflatten(self, values: Mapping[str, object]) -> PyTree:
        """Return the pytree with ``values`` by path."""
        ordered: list[object] = [None] * len(self.leaves)
        for leaf in self.leaves:
            ordered[leaf.position] = values[leaf.spec.path]
        return jax.tree_util.tree_unflatten(self.treedef, ordered)


def path_of(key_path: Sequence[Any]) -> str:
    """Return the path of a leaf by its keys, joined by slashes."""
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator="/")


def describe(state: PyTree, operation: str) -> StateTree:
    """Describe ``state`` (arrays or specs with shape, dtype and sharding). Not collective.

    Raises:
      InvalidState: a leaf of an unsupported type or dtype or of too many dimensions, a path too
        long, two leaves with one path, or a dict whose keys have no order.
    """
    try:
        flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    except (TypeError, ValueError) as error:
        hint = "the keys of a dict must be keys of one type, such as texts"
        raise InvalidState(operation, "the state", f"no tree: {error}", hint=hint) from error
    leaves: dict[str, Leaf] = {}
    for position, (key_path, value) in enumerate(flat):
        path = path_of(key_path)
        if path in leaves:
            raise _invalid(operation, path, "two leaves have this path", "rename a key")
        if len(path) > MAX_PATH_CHARS or not _is_unicode(path):
            raise InvalidState(
                operation,
                f"leaf {path[:100]!r}",
                "its path cannot be stored",
                expected=f"at most {MAX_PATH_CHARS} characters of valid Unicode",
                actual=f"{len(path)} characters",
            )
        leaf = leaves[path] = _describe_leaf(value, path, position, operation)
        if leaf.spec.dtype not in DTYPE_ITEM_BYTES:
            raise InvalidState(
                operation, f"leaf {path!r}", f"dtype {leaf.spec.dtype} has no bytes to store"
            )
        if len(leaf.spec.global_shape) > MAX_DIMENSIONS:
            raise InvalidState(
                operation,
                f"leaf {path!r}",
                "it has too many dimensions",
                expected=f"at most {MAX_DIMENSIONS}",
                actual=len(leaf.spec.global_shape),
            )
    return StateTree(tuple(leaves[path] for path in sorted(leaves)), treedef)


def check_values(tree: StateTree, flat: Sequence[Any], operation: str) -> None:
    """InvalidState for a leaf of a state like ``tree`` that has no values here (any more)."""
    for leaf in tree.leaves:
        if leaf.sharding is None:
            continue
        value = flat[leaf.position]
        if not isinstance(value, jax.Array):
            problem = f"a {type(value).__name__} has no values"
            raise _invalid(operation, leaf.spec.path, problem, "give the arrays themselves")
        if value.is_deleted():
            problem = "its array is deleted: it was donated to a step already"
            hint = "give the state that the step returned"
            raise _invalid(operation, leaf.spec.path, problem, hint)


def _invalid(operation: str, path: str, problem: str, hint: str) -> InvalidState:
    return InvalidState(operation, f"leaf {path!r}", problem, hint=hint)


def is_python_number(value: object) -> bool:
    """Return whether ``value`` is a Python number; numpy scalars are not, not even floats."""
    return isinstance(value, tuple(_NUMBERS)) and not isinstance(value, np.generic)


def is_numpy_value(value: object) -> bool:
    """Return whether ``value`` is all that its bytes say, as no subclass is (a masked array)."""
    return type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe_leaf(value: Any, path: str, position: int, operation: str) -> Leaf:
    if is_python_number(value):
        spec = LeafSpec(path, np.asarray(value).dtype.name, ())
        kind = next(kind for kind in _NUMBERS if isinstance(value, kind))
        return Leaf(spec, LeafKind.SCALAR, None, position, _NUMBERS[kind])
    if isinstance(value, np.ndarray | np.generic):
        if not is_numpy_value(value):
            problem = f"a {type(value).__name__} would come back as a plain array"
            hint = "give numpy.asarray of it, and of a masked array its data and its mask"
            raise _invalid(operation, path, problem, hint)
        spec = LeafSpec(path, value.dtype.name, tuple(value.shape))
        return Leaf(spec, LeafKind.NUMPY, None, position)
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        hint = "put iterators and other Python state into host_state"
        if callable(value):
            hint = "save its arrays only, as eqx.filter(model, eqx.is_array) gives them"
        problem = f"type {type(value).__name__} cannot be checkpointed"
        raise _invalid(operation, path, problem, hint)
    shape = tuple(int(dim) for dim in value.shape)
    sharding = _sharding_of(value, path, operation)
    if is_key_type(value.dtype):
        data_spec, impl = _key_data_spec(shape, value.dtype)
        spec = LeafSpec(path, data_spec.dtype.name, tuple(data_spec.shape), impl)
        return Leaf(spec, LeafKind.KEYS, sharding, position)
    spec = LeafSpec(path, np.dtype(value.dtype).name, shape)
    return Leaf(spec, LeafKind.ARRAY, sharding, position)


def _sharding_of(value: Any, path: str, operation: str) -> jax.sharding.Sharding:
    sharding = getattr(value, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        sharding = _on_devices(sharding, path, operation)
    if isinstance(sharding, jax.sharding.Sharding):
        owners = {device.process_index for device in sharding.device_set}
        if len(owners) == 1 and jax.process_index() not in owners:
            problem = f"it is on devices of process {owners.pop()} alone"
            hint = "divide it over devices of several processes, or give each process a copy"
            raise _invalid(operation, path, problem, hint)
        return sharding
    if jax.process_count() == 1:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    hint = "in a job of several processes every array spec needs one"
    raise _invalid(operation, path, "the spec has no sharding", hint)


def _on_devices(sharding: NamedSharding, path: str, operation: str) -> NamedSharding:
    """Return the sharding on the mesh in force, which a spec of ``jax.eval_shape`` leaves open."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.abstract_mesh != sharding.mesh:
        other = "none" if mesh.empty else "another one"
        problem = f"its mesh has no devices, and {other} is in force"
        hint = "call it under jax.set_mesh(mesh), as the function of the spec was"
        raise _invalid(operation, path, problem, hint)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _key_data_spec(shape: tuple[int, ...], dtype: Any) -> tuple[jax.ShapeDtypeStruct, str]:
    impl: list[str] = []

    def data_of(keys: jax.Array) -> jax.Array:
        impl.append(str(jax.random.key_impl(keys)))
        return jax.random.key_data(keys)

    data = jax.eval_shape(data_of, jax.ShapeDtypeStruct(shape, dtype))
    return data, impl[0]


def is_key_type(dtype: Any) -> bool:
    """Return whether arrays of ``dtype`` hold PRNG keys."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def boxes_by_device(leaf: Leaf) -> Mapping[Device, Box]:
    """Return the box that each device of the leaf's sharding holds; empty for host values."""
    if leaf.sharding is None:
        return {}
    return _boxes_by_device(leaf.sharding, leaf.spec.global_shape)


@functools.lru_cache(maxsize=_REMEMBERED_KINDS)
def _boxes_by_device(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> Mapping[Device, Box]:
    """Cached: thousands of leaves have few shardings and shapes between them."""
    boxes = {
        device: box_at(indices, shape)
        for device, indices in sharding.devices_indices_map(shape).items()
    }
    return MappingProxyType(boxes)


def box_at(indices: Sequence[slice], shape: Sequence[int]) -> Box:
    """Return the box of JAX's index of a shard in an array of ``shape``."""
    return tuple(
        (index.start or 0, dim if index.stop is None else index.stop)
        for index, dim in zip(indices, shape, strict=True)
    )


class BoxTable:
    """The boxes of each leaf that each process holds. Leaves of one sharding and shape share them.

    Host values, and arrays on the devices of one process only, count as held in full by every
    process, because each process has its own equal copy of them.
    """

    def __init__(self, tree: StateTree, process_count: int) -> None:
        self._process_count = process_count
        self._by_kind: dict[tuple[object, ...], dict[int, tuple[Box, ...]]] = {}
        self._leaf_keys: list[tuple[LeafSpec, tuple[object, ...]]] = []
        for leaf in tree.leaves:
            key = (leaf.sharding, leaf.spec.global_shape)
            if key not in self._by_kind:
                self._by_kind[key] = self._boxes_by_process(leaf)
            self._leaf_keys.append((leaf.spec, key))
        self._key_by_path = {spec.path: key for spec, key in self._leaf_keys}
        self._groups: dict[tuple[object, ...], dict[Box, int]] = {}
        self._group_numbers: dict[tuple[int, ...], int] = {}  # by the processes of the group

    def _boxes_by_process(self, leaf: Leaf) -> dict[int, tuple[Box, ...]]:
        boxes_of: dict[int, set[Box]] = {}
        for device, box in boxes_by_device(leaf).items():
            boxes_of.setdefault(device.process_index, set()).add(box)
        if len(boxes_of) <= 1 < self._process_count or not boxes_of:
            everywhere = (whole(leaf.spec.global_shape),)
            return dict.fromkeys(range(self._process_count), everywhere)
        return {process: tuple(sorted(boxes)) for process, boxes in boxes_of.items()}

    def shards_of(self, process: int) -> tuple[ShardId, ...]:
        """Return the distinct shards that ``process`` holds, sorted."""
        return tuple(
            ShardId(spec.path, box)
            for spec, key in self._leaf_keys
            for box in self._by_kind[key].get(process, ())
        )

    def group_of(self, shard: ShardId) -> int | None:
        """Return a number that shards share which the same processes hold; None for no holder."""
        key = self._key_by_path.get(shard.leaf)
        if key is None:
            return None
        groups = self._groups.get(key)
        if groups is None:
            number = self._group_numbers
            holders = self._holders(key)
            groups = {box: number.setdefault(who, len(number)) for box, who in holders.items()}
            self._groups[key] = groups
        return groups.get(shard.box)

    def groups_of(self, shards: Iterable[ShardId]) -> list[int] | None:
        """Return ``group_of`` each of ``shards``; None where some shard has no holder."""
        groups: list[int] = []
        for shard in shards:
            group = self.group_of(shard)
            if group is None:
                return None
            groups.append(group)
        return groups

    def needs_of(self, process: int) -> tuple[str, ...]:
        """Return the sorted names of the sets of shards that ``process`` holds."""
        shards, leaves = self.shards_of(process), [spec for spec, _ in self._leaf_keys]
        return tuple(sorted(shards_by_set(leaves, shards, self.groups_of(shards) or ())))

    def targets(self) -> Targets:
        """Return ``shards_of`` every process; processes with equal shards share one tuple."""
        return Targets(self._process_count, self._targets)

    def _targets(self) -> dict[int, tuple[ShardId, ...]]:
        kinds = list(self._by_kind.values())
        shared: dict[tuple[tuple[Box, ...], ...], tuple[ShardId, ...]] = {}
        result: dict[int, tuple[ShardId, ...]] = {}
        for process in range(self._process_count):
            signature = tuple(kind.get(process, ()) for kind in kinds)
            if signature not in shared:
                shared[signature] = self.shards_of(process)
            result[process] = shared[signature]
        return result

    def held_leaves(self) -> tuple[HeldLeaves, ...]:
        """Return the holders for ``place``: one entry for all leaves of one sharding and shape."""
        paths: dict[tuple[object, ...], dict[str, int]] = {}
        for spec, key in self._leaf_keys:
            paths.setdefault(key, {})[spec.path] = DTYPE_ITEM_BYTES[spec.dtype]
        shapes = {key: spec.global_shape for spec, key in self._leaf_keys}
        return tuple(
            HeldLeaves(shapes[key], items, self._holders(key)) for key, items in paths.items()
        )

    def _holders(self, key: tuple[object, ...]) -> dict[Box, tuple[int, ...]]:
        processes_of: dict[Box, list[int]] = {}
        for process, boxes in sorted(self._by_kind[key].items()):
            for box in boxes:
                processes_of.setdefault(box, []).append(process)
        return {box: tuple(processes) for box, processes in processes_of.items()}
