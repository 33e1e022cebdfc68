"""``eckpt export``: steps of both tiers as directories that plain Orbax restores bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from damage import flip
from looks import eckpt_here, tree_of
from places import JOBS
from programs import eckpt, ended
from quarters import W, save_quarters
from tiers_support import LAYOUT, RUN_ID, shard_bytes, whole_steps
from world import World, same


def training_state(step: int) -> dict[str, Any]:
    params = {
        "w": jax.numpy.arange(6.0).reshape(2, 3) + step,
        "layers": [jax.numpy.full(3, step, jax.numpy.bfloat16), jax.numpy.array([np.nan, -0.0])],
    }
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),  # with a state without leaves
        "rng": jax.random.key(step),
        "bits": jax.numpy.arange(4, dtype=jax.numpy.int4),
        "step": step,
    }


def bits_of(tree: Any) -> list[bytes]:
    def data(leaf: Any) -> np.ndarray:
        is_key = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [data(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def save_steps(world: World, *steps: int) -> None:
    """Save in RAM at each step, and in storage at even ones."""
    with world.open_both(replica_axis=None, mesh=None) as ckpt:
        for step in steps:
            ckpt.save(step=step, state=training_state(step), host_state={"at": step, "big": 2**70})
            ckpt.wait_until_finished()
        ckpt.check_for_errors()


def orbax_restore(directory: Path, step: int, like: Any = None) -> Any:
    args = ocp.args.StandardRestore() if like is None else ocp.args.StandardRestore(like)
    with ocp.CheckpointManager(directory) as manager:
        assert manager.all_steps() == [step]
        return manager.restore(step, args=ocp.args.Composite(state=args)).state


def test_export_of_both_tiers_is_restored_by_plain_orbax(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(world, 2, 3)
    roots = (world.ramdisk, world.persistent)
    before = tree_of(*roots)
    places = ["--local-dir", str(world.ramdisk), "--dir", str(world.persistent)]
    for name, step in (("ram:newest", 3), ("storage:2", 2)):
        out = tmp_path / "made" / str(step)
        assert eckpt_here("export", name, out, *places) == 0, capsys.readouterr().err
        restored = orbax_restore(out, step, training_state(0))
        assert bits_of(restored) == bits_of(training_state(step))
        assert jax.tree.structure(restored) == jax.tree.structure(training_state(step))
        (path,) = (out / "host_states").iterdir()
        assert path.name == "process_00000_of_00001.json"
        assert json.loads(path.read_text()) == {"at": step, "big": {"__int__": hex(2**70)}}
        assert eckpt_here("diff", name, str(out / str(step)), *places) == 0
    assert tree_of(*roots) == before
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["2", "3"]


PLAIN_READER = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp
assert jax.device_count() == 1
live = {
    "w": jax.numpy.zeros((8, 4)),
    "rng": jax.random.key(0),
    "step": 0,
    "host": np.zeros(3),
}
specs = jax.tree.map(ocp.utils.to_shape_dtype_struct, live)
on_devices = ocp.checkpoint_utils.construct_restore_args(live)
for target, args in (
    (None, None),
    (None, ocp.args.StandardRestore()),
    (None, ocp.args.PyTreeRestore()),
    (specs, ocp.args.StandardRestore(specs)),
    (live, ocp.args.StandardRestore(live)),
    (live, ocp.args.PyTreeRestore(live, restore_args=on_devices)),
):
    args = None if args is None else ocp.args.Composite(state=args)
    with ocp.CheckpointManager(sys.argv[1]) as manager:
        found = manager.restore(7, args=args).state
    assert np.asarray(found["w"]).tobytes() == np.arange(32, dtype=np.float32).tobytes()
    assert np.array_equal(found["host"], [0, 1, 2])
    assert found["step"] == 7
    if target is live:
        assert isinstance(found["w"], jax.Array)
        assert jax.dtypes.issubdtype(found["rng"].dtype, jax.dtypes.prng_key)
        assert jax.random.key_data(found["rng"]).tolist() == [0, 3]
"""


@pytest.mark.parametrize("tier", ["ram", "storage"])
def test_export_from_many_devices_is_restored_on_one(
    world: World, tmp_path: Path, tier: str
) -> None:
    axes = jax.sharding.PartitionSpec
    state = {
        "w": np.arange(32, dtype=np.float32).reshape(8, 4),
        "rng": jax.random.key(3),
    }
    specs = {"w": axes("fsdp"), "rng": axes()}
    state = {
        name: jax.device_put(value, jax.sharding.NamedSharding(world.mesh, specs[name]))
        for name, value in state.items()
    }
    with world.open_both() as checkpointer:
        whole = {**state, "step": 7, "host": np.arange(3.0)}
        assert checkpointer.save(step=7, state=whole, force=True)
        checkpointer.wait_until_finished()
        checkpointer.check_for_errors()
    places = ["--local-dir", str(world.ramdisk), "--dir", str(world.persistent)]
    out = tmp_path / "out"
    assert eckpt_here("export", f"{tier}:7", out, *places) == 0
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    program = [sys.executable, "-c", PLAIN_READER, str(out)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["ram:2", "storage:2"])
def test_export_can_be_the_directory_of_a_job(world: World, tmp_path: Path, name: str) -> None:
    save_steps(world, 2)
    places = ["--local-dir", str(world.ramdisk), "--dir", str(world.persistent)]
    out = tmp_path / "out"
    assert eckpt_here("export", name, out, *places) == 0
    world.lose_ram()
    with world.open_both(dir=str(out), replica_axis=None, mesh=None) as ckpt:
        step, state = ckpt.restore(state=training_state(0))
    assert (step, bits_of(state)) == (2, bits_of(training_state(2)))


def test_export_without_storage_makes_dicts_and_says_so(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(world, 3)
    out = tmp_path / "out"
    assert eckpt_here("export", "3", out, "--local-dir", world.ramdisk) == 0
    assert "all its nodes are dicts" in capsys.readouterr().err
    restored = orbax_restore(out, 3)
    state = training_state(3)
    assert bits_of(restored["params"]["layers"]["0"]) == bits_of(state["params"]["layers"][0])
    assert same(restored["opt"]["0"]["count"], np.asarray(state["opt"][0].count))


def damage(directory: Path) -> None:
    (slot,) = (path for path in directory.glob("slot_*.bin") if path.stat().st_size)
    flip(slot, 0)


def test_export_puts_several_ramdisks_together(
    ramdisk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = [ramdisk / "a", ramdisk / "b"]
    save_quarters(hosts[0], {0: [0, 1], 1: [2]})
    second = save_quarters(hosts[1], {2: [0, 3]})
    out = tmp_path / "out"
    assert eckpt_here("export", "5", out, "--local-dir", hosts[0]) == 1
    assert "held nowhere" in capsys.readouterr().err
    both = [word for host in hosts for word in ("--local-dir", str(host))]
    damage(second[2])  # its first quarter, of which the other host has a copy
    assert eckpt_here("export", "5", out, *both) == 0
    assert orbax_restore(out, 5)["w"].tobytes() == W.tobytes()
    damage(hosts[0] / RUN_ID / "process_00000")
    assert eckpt_here("export", "5", tmp_path / "other", *both) == 1
    assert "no copy is sound" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_export_never_writes_over_anything(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(world, 1)
    there = tmp_path / "there"
    there.mkdir()
    places = ["--local-dir", str(world.ramdisk)]
    assert eckpt_here("export", "1", there, *places) == 2
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert eckpt_here("export", "1", tmp_path / "link", *places) == 2
    assert "exists already" in capsys.readouterr().err
    assert eckpt_here("export", "9", tmp_path / "new", *places) == 1
    assert list(there.iterdir()) == []
    assert not (tmp_path / "new").exists()


KILLED = """
import os, signal, sys
from emergency_ckpt.tools.cli.main import main
from emergency_ckpt.tools.offline import export_step
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
setattr(*{"tensors": (export_step.Export, "write_host_states"),
          "rename": (export_step.os, "rename")}[sys.argv[1]], die)
main(sys.argv[2:])
"""


@pytest.mark.parametrize("point", ["tensors", "rename"])
def test_export_killed_leaves_no_directory(ramdisk: Path, tmp_path: Path, point: str) -> None:
    whole_steps(ramdisk, 7, processes=[0])
    out = tmp_path / "out"
    words = ["export", "7", str(out), "--local-dir", str(ramdisk)]
    environment = {"JAX_PLATFORMS": "no such platform"}
    done = ended(JOBS / "text_program.py", KILLED, point, *words, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert [path.name.startswith(".out.eckpt-") for path in tmp_path.iterdir()] == [True]
    done = eckpt(*words, env=environment)
    assert done.returncode == 0, done.stderr
    expected = dict(
        zip([placed.shard.leaf for placed in LAYOUT.shards], shard_bytes(7), strict=True)
    )
    assert orbax_restore(out, 7)["count"].tobytes() == expected["count"]
