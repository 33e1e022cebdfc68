"""The model learns, on one device and on a mesh of slices, and its state is laid out as said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from emergency_ckpt.tools.demo import model
from emergency_ckpt.tools.demo.data import DataConfig, make_iterator, read_corpus
from emergency_ckpt.tools.demo.train import iterator_digest, shard_digests

SMALL = model.ModelConfig(sequence_length=16, d_model=16, num_heads=2, num_layers=1)


@pytest.mark.parametrize(
    ("shape", "fsdp_size", "spec"),
    [
        ((), 2, PartitionSpec()),
        ((128,), 2, PartitionSpec("fsdp")),
        ((128, 384), 2, PartitionSpec(None, "fsdp")),
        ((384, 128), 2, PartitionSpec("fsdp")),
        ((128, 128), 2, PartitionSpec("fsdp")),
        ((7, 128), 2, PartitionSpec(None, "fsdp")),
        ((7, 5), 2, PartitionSpec()),
        ((1, 1), 2, PartitionSpec()),
    ],
)
def test_largest_dimension_that_divides_is_sharded(
    shape: tuple[int, ...], fsdp_size: int, spec: PartitionSpec
) -> None:
    assert model.partition_spec(shape, fsdp_size) == spec


@pytest.mark.slow
def test_loss_goes_down_on_one_device() -> None:
    mesh = model.make_mesh(1)
    data = DataConfig(
        sequence_length=16, batch_size=8 * mesh.size, seed=0, process_index=0, process_count=1
    )
    batches = make_iterator(data, read_corpus(limit_bytes=200_000))
    step = model.compile_train_step(SMALL, mesh, 8 * mesh.size)
    state = model.init_state(SMALL, mesh, seed=0)
    losses: list[float] = []
    for _ in range(40):
        state, loss = step(state, model.global_batch(mesh, next(batches)))
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(256), rel=0.05)
    assert np.mean(losses[-5:]) < losses[0] - 1


def test_abstract_state_is_the_state_without_values() -> None:
    mesh = model.make_mesh(1)
    abstract, state = model.abstract_state(SMALL, mesh), model.init_state(SMALL, mesh, seed=0)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for spec, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (spec.shape, spec.dtype) == (leaf.shape, leaf.dtype)
        assert spec.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


@pytest.mark.slow
def test_digests_tell_bits_apart() -> None:
    mesh = model.make_mesh(1)
    first = shard_digests(model.init_state(SMALL, mesh, seed=0))
    assert first == shard_digests(model.init_state(SMALL, mesh, seed=0))
    other = shard_digests(model.init_state(SMALL, mesh, seed=1))
    assert first.keys() == other.keys()
    changed = {name.partition("[")[0] for name in first if first[name] != other[name]}
    assert "params/embedding" in changed
    assert "key" in changed
    assert "params/final_norm" not in changed
    zeros = {"a": jax.numpy.zeros(4), "b": jax.numpy.zeros(4, "int32"), "c": -jax.numpy.zeros(4)}
    assert len(set(shard_digests(zeros).values())) == 3


def test_iterator_digests() -> None:
    assert iterator_digest({"a": 1, "b": 2}) == iterator_digest({"b": 2, "a": 1})
    assert iterator_digest({"a": 1}) != iterator_digest({"a": 2})
    assert iterator_digest(b"x") != iterator_digest(b"y")


MESH_PROGRAM = """
import json
import jax
from emergency_ckpt.tools.demo import model
from emergency_ckpt.tools.demo.data import DataConfig, make_iterator, read_corpus
from emergency_ckpt.tools.demo.train import shard_digests

config = model.ModelConfig(sequence_length=16, d_model=16, num_heads=2, num_layers=1)
mesh = model.make_mesh(2)
data = DataConfig(sequence_length=16, batch_size=8, seed=0, process_index=0, process_count=1)
batches = make_iterator(data, read_corpus(limit_bytes=200_000))
step = model.compile_train_step(config, mesh, 8)
state = model.init_state(config, mesh, seed=0)
losses = []
for _ in range(3):
    state, loss = step(state, model.global_batch(mesh, next(batches)))
    losses.append(float(loss))
qkv = state["params"]["layer_0"]["qkv"]
print(json.dumps({
    "losses": losses,
    "mesh": dict(mesh.shape),
    "boxes": sorted(name for name in shard_digests(state) if "params/layer_0/qkv" in name),
    "qkv_shards": [list(shard.data.shape) for shard in qkv.addressable_shards],
    "replicated": sorted(
        name for name in shard_digests(state) if name.startswith(("key", "opt_state/0/count"))
    ),
}))
"""


def run_on_four_devices() -> dict[str, object]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MESH_PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_state_is_sharded_in_a_slice_and_replicated_over_slices() -> None:
    first = run_on_four_devices()
    assert first["mesh"] == {"slice": 2, "fsdp": 2}
    assert first["qkv_shards"] == [[16, 24]] * 4
    assert first["boxes"] == [
        "params/layer_0/qkv[0:16,0:24]",
        "params/layer_0/qkv[0:16,24:48]",
    ]
    assert first["replicated"] == ["key[0:2]", "opt_state/0/count[]"]
    assert first == run_on_four_devices()  # bit-identical losses from run to run


def test_devices_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        model.make_mesh(jax.device_count() + 1)
