"""How replicated boxes are divided among the processes that write them."""

from __future__ import annotations

import dataclasses

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from emergency_ckpt.core.boxes import whole
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.state import HostShard, StateTree, describe
from emergency_ckpt.state.tree import boxes_by_device
from emergency_ckpt.storage.item import item_state
from emergency_ckpt.storage.writer_arrays import check_storable, spread
from emergency_ckpt.types import ShardId

MESH = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("slice", "fsdp", "tensor"))

DIVIDED = {
    # shape, sharding, what each device stores
    "over slices": ((8, 6), P("fsdp", "tensor"), (2, 3)),
    "along the second axis": ((6, 4), P("fsdp", "tensor"), (3, 1)),
    "over slices and tensor": ((16, 3), P("fsdp"), (2, 3)),
    "over all": ((16,), P(), (2,)),
    "two mesh axes on one": ((16, 2), P(("fsdp", "tensor")), (2, 2)),
    "an axis that no spec names": ((3, 16), P(None), (3, 2)),
}
WHOLE = {
    "nothing is replicated": ((8, 4, 2), P("slice", "fsdp", "tensor")),
    "no axis divides": ((6, 3), P("fsdp")),
    "a scalar": ((), P()),
}
SHARDINGS = {name: (shape, spec) for name, (shape, spec, *_) in {**DIVIDED, **WHOLE}.items()}


def stored_by(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> np.ndarray:
    """How many devices store each element."""
    counts = np.zeros(shape, int)
    for index in sharding.devices_indices_map(shape).values():
        counts[index] += 1
    return counts


@pytest.mark.parametrize("case", DIVIDED)
def test_each_element_is_stored_once_and_all_store_alike(case: str) -> None:
    shape, spec, part = DIVIDED[case]
    divided = spread(NamedSharding(MESH, spec), shape)
    assert divided.shard_shape(shape) == part
    assert (stored_by(divided, shape) == 1).all()


@pytest.mark.parametrize("case", DIVIDED)
def test_each_device_stores_part_of_what_it_holds(case: str) -> None:
    shape, spec, _ = DIVIDED[case]
    held = NamedSharding(MESH, spec)
    parts = spread(held, shape).devices_indices_map(shape)
    for device, index in held.devices_indices_map(shape).items():
        whole = np.zeros(shape, bool)
        whole[index] = True
        assert whole[parts[device]].all()


@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_divided_stays_as_it_is(case: str) -> None:
    shape, spec = WHOLE[case]
    held = NamedSharding(MESH, spec)
    assert spread(held, shape) is held


def test_sharding_without_names_stays_as_it_is() -> None:
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    assert spread(alone, (8,)) is alone


@pytest.mark.parametrize("writers", [(0,), (0, 1)])
def test_arrays_have_every_value(writers: tuple[int, ...]) -> None:
    """One process holds all devices here; of two writers it is the one that stores all parts."""
    values = {
        name: np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
        for name, (shape, _) in SHARDINGS.items()
    }
    state = {
        name: jax.device_put(value, NamedSharding(MESH, SHARDINGS[name][1]))
        for name, value in values.items()
    }
    tree = describe(state, "save")
    shards: dict[ShardId, HostShard] = {}
    for leaf in tree.leaves:
        name, boxes = leaf.spec.path, boxes_by_device(leaf)
        for shard in state[name].addressable_shards:
            view = np.asarray(shard.data)
            shards[ShardId(name, boxes[shard.device])] = HostShard(view, 0)
    arrays = item_state(tree, shards, writers)
    for name, value in values.items():
        found, times = np.zeros_like(value), np.zeros(value.shape, int)
        for part in arrays[name].parts:
            index = tuple(slice(start, stop) for start, stop in part.box)
            assert part.load().shape == arrays[name].write_shape
            found[index], times[index] = part.load(), times[index] + 1
        np.testing.assert_array_equal(found, value)
        assert (times == 1).all()
        divided = len(writers) > 1 and name in DIVIDED
        assert (stored_by(arrays[name].sharding, value.shape) == 1).all() == (
            divided or name == "nothing is replicated"
        )


def test_values_to_write_are_those_of_the_snapshot() -> None:
    """A copy would need the memory of the whole state once more."""
    state = {
        "divided": jax.device_put(np.ones((16, 4), np.float32), NamedSharding(MESH, P())),
        "host": np.arange(4),
    }
    tree = describe(state, "save")
    views = {"divided": np.asarray(state["divided"]), "host": state["host"]}
    shards = {ShardId(name, whole(view.shape)): HostShard(view, 0) for name, view in views.items()}
    for name, array in item_state(tree, shards, (0, 1)).items():
        assert array.parts
        for part in array.parts:
            assert np.shares_memory(part.load(), views[name])


def test_dtype_unknown_to_orbax_is_refused_before_training() -> None:
    tree = describe({"bad": np.zeros(2), "good": np.zeros(2)}, "save")
    bad = msgspec.structs.replace(tree.leaves[0].spec, dtype="a new one")
    leaves = (dataclasses.replace(tree.leaves[0], spec=bad), *tree.leaves[1:])
    with pytest.raises(
        InvalidState, match="'bad': the persistent tier cannot store dtype a new one"
    ):
        check_storable(StateTree(leaves, tree.treedef))
