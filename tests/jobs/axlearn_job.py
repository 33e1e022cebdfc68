"""The acceptance scenario of axlearn's emergency checkpointer, and the trainer's other ways.

It imports the double of axlearn. Hosts are known by the ramdisk that they have, processes by their
number in this life.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from places import AXLEARN_DOUBLE

# Here and not by PYTHONPATH, with which each process would need an interpreter of its own.
sys.path.insert(0, str(AXLEARN_DOUBLE))

import axlearn_contract
import grain_data
import jax
import numpy as np
from axlearn.common.checkpointer import every_n_steps_policy, indexed_steps, read_state_spec
from axlearn.common.config import config_for_function
from axlearn.common.trainer import WIDTH, SpmdTrainer, TrainerConfig
from job_process import JobProcess, programs_of, run_program
from readme_blocks import readme_block

from emergency_ckpt.axlearn import EmergencyCheckpointer
from emergency_ckpt.config import Config
from emergency_ckpt.tools.job_environment import JobEnvironment

STOP, LAST_SAVED, END = 44, 95, 99

# A slow disk must not cost a save: instead of the property of this name.
setattr(Config, "storage_wait_timeout_s", 60.0)  # noqa: B010


def checkpointer(name: str, **settings: Any) -> Any:
    cfg = EmergencyCheckpointer.default_config().set(
        save_policy=config_for_function(every_n_steps_policy).set(n=25),
        local_save_policy=config_for_function(every_n_steps_policy).set(n=5),
        local_dir=str(JobEnvironment.from_environ().local_dir / name),
        keep_last_n=2,
        replica_axis_index=0,
        non_tensor_async_timeout_secs=120,
    )
    return cfg.set(**settings)


def trainer(world: JobProcess, name: str, max_step: int, **settings: Any) -> SpmdTrainer:
    other = {key: settings.pop(key) for key in ("save_input_iterator",) if key in settings}
    cfg = TrainerConfig(
        dir=str(world.root / "persistent" / name),
        mesh=axlearn_contract.mesh(),
        checkpointer=checkpointer(name, **settings),
        dataset=lambda: grain_data.loader(WIDTH, world.process, world.count),
        max_step=max_step,
        **other,
    )
    return SpmdTrainer(cfg)


def outcome(done: SpmdTrainer) -> dict[str, Any]:
    """The last step's state and what was seen on the way to it."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(done.state):
        for shard in leaf.addressable_shards:
            digest.update(np.asarray(shard.data).tobytes())
    return {
        "step": done.step,
        "state": digest.hexdigest(),
        "restores": done.restores,
        "losses": done.losses,
    }


def undisturbed(world: JobProcess) -> Any:
    train = trainer(world, "undisturbed", END)
    assert train.run()
    return outcome(train)


def until_44(world: JobProcess) -> Any:
    train = trainer(world, "acceptance", STOP)
    assert train.run()
    return outcome(train)


def resumed(world: JobProcess) -> Any:
    """The next life: 40 is not whole, 35 is; then on to the end."""
    train = trainer(world, "acceptance", END)
    base = f"{world.root}/persistent/acceptance/checkpoints"
    before = EmergencyCheckpointer.checkpoint_steps(base)
    world.meet()
    restored: list[Any] = []
    restore = train.checkpointer.restore

    def watched(**kwargs: Any) -> Any:
        found = restore(**kwargs)
        restored.append((found[0], train.checkpointer.last_restore))
        return found

    train.checkpointer.restore = watched
    assert train.run()
    (step, report), *more = restored
    assert not more
    return {
        **outcome(train),
        "restored": step,
        "tier": report.tier,
        "rejected": [rejection.step for rejection in report.rejected],
        "persistent_before": before,
        "latest_before": max(before),
    }


def nothing_left_to_train(world: JobProcess) -> Any:
    """Restored at the end: the context is never entered, and nobody stops the checkpointer."""
    train = trainer(world, "undisturbed", LAST_SAVED)
    return {"trained": train.run(), "step": train.step, "restores": train.restores}


def what_the_tools_see(world: JobProcess) -> Any:
    """Of 25, 50 and 75 storage keeps two."""
    base = f"{world.root}/persistent/undisturbed/checkpoints"
    paths = EmergencyCheckpointer.checkpoint_paths(base)
    spec = read_state_spec(paths[-1])
    leaves = jax.tree_util.tree_flatten_with_path(spec)[0]
    return {
        "steps": EmergencyCheckpointer.checkpoint_steps(base),
        "paths": [Path(path).name for path in paths],
        "indexed": [Path(path).name for path in indexed_steps(base)],
        "arrays": {
            jax.tree_util.keystr(path, simple=True, separator="/"): [
                list(leaf.shape),
                np.dtype(leaf.dtype).name,
            ]
            for path, leaf in leaves
        },
    }


def iterator_saved_but_not_wanted(world: JobProcess) -> Any:
    """Saved without the iterator, then trained with it: the second call of restore finds it."""
    first = trainer(world, "without", 7, save_input_iterator=False)
    assert first.run()
    world.meet()
    second = trainer(world, "without", 9)
    assert second.run()
    return {"restores": second.restores, "trained": len(second.losses), "step": second.step}


def as_the_readme_says(world: JobProcess) -> Any:
    """The README's lines set up the checkpointer; the second trainer goes on after step 10."""
    ramdisk = JobEnvironment.from_environ().local_dir / "readme"
    lines = readme_block("axlearn").replace("/dev/shm/eckpt", str(ramdisk))
    seen: list[Any] = []
    for max_step in (12, 15):
        cfg = TrainerConfig(
            dir=str(world.root / "persistent" / "readme"),
            mesh=jax.sharding.Mesh(
                np.array(jax.devices()).reshape(1, 2, 2), ("pipeline", "data", "model")
            ),
            checkpointer=None,
            dataset=lambda: grain_data.loader(WIDTH, world.process, world.count),
            max_step=max_step,
        )
        exec(lines, {"trainer_config": cfg})
        train = SpmdTrainer(cfg)
        assert train.run()
        seen.append([len(train.losses), train.step])
        world.meet()
    return seen


PROGRAMS: dict[str, Callable[[JobProcess], Any]] = {
    program.__name__: program
    for program in (
        undisturbed,
        until_44,
        what_the_tools_see,
        iterator_saved_but_not_wanted,
        nothing_left_to_train,
        resumed,
        as_the_readme_says,
    )
} | programs_of(vars(axlearn_contract))

if __name__ == "__main__":
    run_program(PROGRAMS)
