"""A directory that plain Orbax wrote is a valid start: tensors, and a clear word about the rest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.config import OrbaxFace
from emergency_ckpt.errors import (
    HostStateError,
    PersistentTierError,
    StateMismatch,
    Unrecoverable,
)

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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "plain"
    with ocp.CheckpointManager(path) as manager:
        for step in (3, 7):
            manager.save(step, args=ocp.args.StandardSave(state_at(step)))
        manager.wait_until_finished()
    return path


@pytest.fixture
def directory(written: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(written, tmp_path / "plain"))


@pytest.fixture
def start(directory: str, tmp_path: Path) -> Any:
    def build(**settings: Any) -> EmergencyCheckpointer:
        return EmergencyCheckpointer(
            dir=directory, local_dir=str(tmp_path / "ram"), mesh=MESH, **settings
        )

    return build


@pytest.mark.dear
def test_tensors_alone_are_restored_bit_for_bit(start: Any) -> None:
    with start() as ckpt:
        step, state = ckpt.restore(state=specs())
        assert ckpt.last_restore.tier == "persistent"
    assert step == 7
    assert same_bits(state, state_at(7))


def test_older_step_by_its_number(start: Any) -> None:
    with start() as ckpt:
        step, state = ckpt.restore(3, state=specs())
    assert step == 3
    assert same_bits(state, state_at(3))


def test_missing_host_state_is_an_error_with_the_way_out(start: Any) -> None:
    with start() as ckpt, pytest.raises(HostStateError, match="call restore without host_state"):
        ckpt.restore(state=specs(), host_state={"batch": 0})


def test_steps_that_are_saved_from_then_on_have_a_host_state(start: Any) -> None:
    host_state = {"batch": 42}
    with start() as ckpt:
        step, state = ckpt.restore(state=specs())
        assert step == 7
        assert same_bits(state, state_at(7))
        ckpt.save(step=9, state=state_at(9), host_state=host_state, force=True)
        ckpt.wait_until_finished()
        ckpt.check_for_errors()
        assert ckpt.all_steps()[-1] == 9


def test_another_shape_is_a_mismatch_and_no_older_step(start: Any) -> None:
    wrong = {**specs(), "w": jax.ShapeDtypeStruct((16, 5), np.float32, sharding=SPLIT)}
    with start() as ckpt, pytest.raises(StateMismatch, match="w: expected"):
        ckpt.restore(state=wrong)


def _write(directory: Path, options: dict[str, Any], args: Any, step: int = 7) -> None:
    with ocp.CheckpointManager(
        directory, options=ocp.CheckpointManagerOptions(**options)
    ) as manager:
        manager.save(step, args=args)
        manager.wait_until_finished()


def _open(directory: Path, **settings: Any) -> EmergencyCheckpointer:
    return EmergencyCheckpointer(
        dir=str(directory), local_dir=str(directory.parent / "ram"), mesh=MESH, **settings
    )


SAVED = state_at(7)
TENSORS = ocp.args.PyTreeSave(SAVED)
TWO_ITEMS = ocp.args.Composite(params=TENSORS, opt=ocp.args.StandardSave({"w": SAVED["w"]}))
LAYOUTS = {
    "a prefix": ({"step_prefix": "checkpoint"}, TENSORS),
    "a fixed length": ({"step_format_fixed_length": 8}, TENSORS),
    "both": ({"step_prefix": "my_run", "step_format_fixed_length": 8}, TENSORS),
    "items and an iterator": (
        {},
        ocp.args.Composite(items=TENSORS, iter=ocp.args.JsonSave({"at": 3})),
    ),
    "one item of any name": (
        {},
        ocp.args.Composite(train_state=TENSORS, config=ocp.args.JsonSave({"lr": 1})),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_step_of_any_layout_is_a_start(tmp_path: Path, layout: str) -> None:
    directory = tmp_path / "plain"
    _write(directory, *LAYOUTS[layout])
    with _open(directory) as ckpt:
        assert ckpt.latest_step() == 7
        step, state = ckpt.restore(state=specs())
        assert step == 7
        assert same_bits(state, SAVED)
        ckpt.save(step=9, state=state_at(9), force=True)
        ckpt.wait_until_finished()
        ckpt.check_for_errors()
        assert ckpt.all_steps() == [7, 9]
    shutil.rmtree(tmp_path / "ram")
    with _open(directory) as ckpt:
        assert ckpt.restore(state=specs())[0] == 9
        assert same_bits(ckpt.restore(7, state=specs())[1], SAVED)


def test_plain_step_of_several_items_is_a_dict_of_them(tmp_path: Path) -> None:
    _write(tmp_path / "plain", {}, TWO_ITEMS)
    like = {"params": specs(), "opt": {"w": specs()["w"]}}
    with _open(tmp_path / "plain") as ckpt:
        step, state = ckpt.restore(state=like)
    assert step == 7
    assert same_bits(state, {"params": SAVED, "opt": {"w": SAVED["w"]}})


def test_plain_step_of_several_items_gives_the_item_asked_for(tmp_path: Path) -> None:
    _write(tmp_path / "plain", {}, TWO_ITEMS)
    with _open(tmp_path / "plain", orbax=OrbaxFace(item="params")) as ckpt:
        assert same_bits(ckpt.restore(state=specs())[1], SAVED)
    shutil.rmtree(tmp_path / "ram")
    with (
        _open(tmp_path / "plain", orbax=OrbaxFace(item="parms")) as ckpt,
        pytest.raises(Unrecoverable, match=r"no item 'parms' .*; it has opt, params"),
    ):
        ckpt.restore(state=specs())


def test_plain_step_with_a_text_that_nobody_asks_for_is_restored(tmp_path: Path) -> None:
    saved = {"w": state_at(7)["w"], "name": "bert", "step": 7}
    _write(tmp_path / "plain", {}, ocp.args.PyTreeSave(saved))
    with _open(tmp_path / "plain") as ckpt:
        step, state = ckpt.restore(state={"w": specs()["w"], "step": 0})
        assert (step, state["step"]) == (7, 7)
        assert same_bits(state["w"], saved["w"])
        with pytest.raises(StateMismatch, match="name: expected"):
            ckpt.restore(state={"w": specs()["w"], "step": 0, "name": np.zeros(3)})


def test_plain_step_without_arrays_is_never_a_fresh_start(tmp_path: Path) -> None:
    _write(tmp_path / "plain", {}, ocp.args.Composite(config=ocp.args.JsonSave({"lr": 1})))
    with (
        _open(tmp_path / "plain") as ckpt,
        pytest.raises(Unrecoverable, match="no item of arrays in it; it has config"),
    ):
        ckpt.restore(state=specs())


@pytest.mark.parametrize("names", [["epoch-7"], ["best_7", "last_8"]], ids=" and ".join)
def test_plain_steps_of_unclear_names_are_never_a_fresh_start(
    tmp_path: Path, names: list[str]
) -> None:
    _write(tmp_path / "other", {}, TENSORS)
    for name in names:
        shutil.copytree(tmp_path / "other" / "7", tmp_path / "plain" / name)
    with (
        _open(tmp_path / "plain") as ckpt,
        pytest.raises(PersistentTierError, match=r"its name has no number|several kinds"),
    ):
        ckpt.restore(state=specs())


def test_folders_of_others_are_no_steps(tmp_path: Path) -> None:
    directory = tmp_path / "plain"
    for name in ("logs_2024", "0001", "tensorboard", "7.orbax-checkpoint-tmp-12"):
        (directory / name).mkdir(parents=True)
    with _open(directory) as ckpt:
        assert ckpt.restore(state=specs())[0] is None
    _write(directory, {"step_prefix": "checkpoint"}, TENSORS)
    with _open(directory) as ckpt:
        assert ckpt.restore(state=specs())[0] == 7


def test_restore_of_a_replaced_plain_step_loads_the_new_one(start: Any, directory: str) -> None:
    """RAM holds what was loaded under this number before."""
    with start() as ckpt:
        _, state = ckpt.restore(state=specs())
        assert same_bits(state, state_at(7))
    with ocp.CheckpointManager(directory) as manager:
        manager.delete(7)
        manager.save(7, args=ocp.args.StandardSave(state_at(8)))
        manager.wait_until_finished()
    with start() as ckpt:
        step, state = ckpt.restore(state=specs())
        assert step == 7
        assert same_bits(state, state_at(8))
        assert ckpt.last_restore.tier == "persistent"
    with start() as ckpt:  # and that one lies in RAM now
        ckpt.restore(state=specs())
        assert ckpt.last_restore.tier == "local"
