"""A directory that plain Orbax wrote is a valid start: tensors, and a clear word about the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import HostStateError, StateMismatch

MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("slice", "fsdp"))
SPLIT = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("fsdp"))
WHOLE = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())


def state_at(step: int) -> dict[str, Any]:
    weights = np.random.default_rng(step).normal(size=(16, 6)).astype(np.float32)
    nibbles = (np.arange(8) % 8).astype(ml_dtypes.int4)
    keys = jax.random.wrap_key_data(
        jax.device_put(jax.random.key_data(jax.random.split(jax.random.key(step), 2)), WHOLE)
    )
    return {
        "w": jax.device_put(weights, SPLIT),
        "nibbles": jax.device_put(nibbles, SPLIT),
        "opt": ({"mu": jax.device_put(weights.astype(ml_dtypes.bfloat16), WHOLE)}, step),
        "keys": keys,
    }


def specs() -> Any:
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        state_at(0),
    )


def same_bits(a: Any, b: Any) -> bool:
    def bits(x: Any) -> bytes:
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x).tobytes()

    return jax.tree.all(jax.tree.map(lambda x, y: bits(x) == bits(y), a, b))


@pytest.fixture
def directory(tmp_path: Path) -> str:
    path = tmp_path / "plain"
    with ocp.CheckpointManager(path) as manager:
        for step in (3, 7):
            manager.save(step, args=ocp.args.StandardSave(state_at(step)))
        manager.wait_until_finished()
    return str(path)


@pytest.fixture
def start(directory: str, tmp_path: Path) -> Any:
    def build(**settings: Any) -> EmergencyCheckpointer:
        return EmergencyCheckpointer(
            dir=directory, local_dir=str(tmp_path / "ram"), mesh=MESH, **settings
        )

    return build


def test_tensors_alone_are_restored_bit_for_bit(start: Any) -> None:
    with start() as ckpt:
        step, state = ckpt.restore(state=specs())
        assert ckpt.last_restore.tier == "persistent"
    assert step == 7
    assert same_bits(state, state_at(7))


def test_an_older_step_by_its_number(start: Any) -> None:
    with start() as ckpt:
        step, state = ckpt.restore(3, state=specs())
    assert step == 3
    assert same_bits(state, state_at(3))


def test_the_missing_host_state_is_an_error_with_the_way_out(start: Any) -> None:
    with start() as ckpt, pytest.raises(HostStateError, match="allow_missing_host_state"):
        ckpt.restore(state=specs(), host_state={"batch": 0})


def test_with_the_option_the_host_state_stays_as_it_is(start: Any) -> None:
    host_state = {"batch": 41}
    with start(allow_missing_host_state=True) as ckpt:
        step, state = ckpt.restore(state=specs(), host_state=host_state)
        assert (step, host_state) == (7, {"batch": 41})
        assert same_bits(state, state_at(7))
        # What is saved from here on has one, beside the steps of plain Orbax.
        host_state["batch"] = 42
        ckpt.save(step=9, state=state_at(9), host_state=host_state, force=True)
        ckpt.wait_until_finished()
        ckpt.check_for_errors()
        assert ckpt.all_steps()[-1] == 9


def test_another_shape_is_a_mismatch_and_no_older_step(start: Any) -> None:
    wrong = {**specs(), "w": jax.ShapeDtypeStruct((16, 5), np.float32, sharding=SPLIT)}
    with start() as ckpt, pytest.raises(StateMismatch, match="w: expected"):
        ckpt.restore(state=wrong)
