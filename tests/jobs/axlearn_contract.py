"""What axlearn's trainer counts on, one call at a time. Programs of ``axlearn_job``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from axlearn.common.config import config_for_function
from axlearn.common.utils import TensorSpec, VDict, current_mesh
from jax.sharding import PartitionSpec as P
from job_process import Iterator, JobProcess

from emergency_ckpt.axlearn import EmergencyCheckpointer
from emergency_ckpt.tools.job_environment import JobEnvironment

PHRASE = "checkpoint tree dtypes or shapes"


def never(*, step: int, evaler_summaries: dict[str, Any]) -> bool:
    del step, evaler_summaries
    return False


def always(*, step: int, evaler_summaries: dict[str, Any]) -> bool:
    del step, evaler_summaries
    return True


def policy(function: Callable[..., bool]) -> Any:
    return config_for_function(lambda: function)


def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))


def build(world: JobProcess, name: str, **settings: Any) -> EmergencyCheckpointer:
    cfg = EmergencyCheckpointer.default_config().set(
        name="checkpointer",
        dir=str(world.root / "persistent" / name),
        trainer_dir=str(world.root / name),
        local_dir=str(JobEnvironment.from_environ().local_dir / name),
        save_policy=policy(never),
        local_save_policy=policy(always),
        replica_axis_index=0,
        non_tensor_async_timeout_secs=120,
    )
    return cfg.set(**settings).instantiate(parent=None)


class FailsOnce(Iterator):
    """Cannot be set to a state at the first try."""

    failures = 1

    def set_state(self, state: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the source of the data does not answer")
        super().set_state(state)


def specs() -> dict[str, Any]:
    weights = TensorSpec([8, 4], jnp.bfloat16, P(None, "model"))
    on_host = TensorSpec([8], jnp.float32, P("model"), memory_kind="pinned_host")
    return {
        "prng_key": TensorSpec([4], jnp.uint32, P(None)),
        "model": VDict(w=weights, nothing=None),
        "learner": (optax.TraceState(trace=on_host), optax.EmptyState(), None),
    }


def state_at(step: int) -> dict[str, Any]:
    def value(spec: TensorSpec) -> jax.Array:
        whole = np.arange(int(np.prod(spec.shape))).reshape(tuple(spec.shape)) + step
        whole = whole.astype(spec.dtype)
        sharding: Any = spec.sharding
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(value, specs())


def save(checkpointer: EmergencyCheckpointer, step: int, iterator: Iterator, **more: Any) -> None:
    state = {**state_at(step), "input_iter": iterator, **more}
    checkpointer.save(step=step, state=state)
    iterator.position = -1  # as the next step moves it on
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array):
            leaf.delete()  # as the next step is given the state
    checkpointer.wait_until_finished()


def error_of(checkpointer: EmergencyCheckpointer, state: Any, step: int | None = None) -> Any:
    try:
        found, _ = checkpointer.restore(step=step, state=state)
    except Exception as error:  # noqa: BLE001 - the trainer catches all
        return [isinstance(error, ValueError), type(error).__name__, str(error)]
    return f"restored {found}"


def nothing_is_there(world: JobProcess) -> Any:
    checkpointer = build(world, "nothing")
    with current_mesh(mesh()):
        asked = {**specs(), "input_iter": Iterator(world.process)}
        step, state = checkpointer.restore(state=asked)
        missing = error_of(checkpointer, asked, step=7)
        again, _ = checkpointer.restore(state=asked)
    return {"found": [step, again], "same": state is asked, "missing": missing[:2]}


def structure_is_exact(world: JobProcess) -> Any:
    """Each of these would make the trainer begin its input anew, were it not refused."""
    checkpointer = build(world, "structure", save_policy=policy(lambda *, step, **_: step == 5))
    iterator = Iterator(world.process)
    with current_mesh(mesh()):
        save(checkpointer, 5, iterator.at(5))
        right, fresh = specs(), Iterator(world.process)
        wrong = {
            "dtype of model/w": {
                **right,
                "model": VDict(w=TensorSpec([8, 4], jnp.float32, P()), nothing=None),
                "input_iter": fresh,
            },
            "shape of prng_key": {
                **right,
                "prng_key": TensorSpec([2], jnp.uint32),
                "input_iter": fresh,
            },
            "extra model/nothing": {
                **right,
                "model": VDict(right["model"], nothing=TensorSpec([4], jnp.float32)),
                "input_iter": fresh,
            },
            "missing learner/0/trace": {
                **right,
                "learner": (None, optax.EmptyState(), None),
                "input_iter": fresh,
            },
            "no input_iter": dict(right),
            "another other_iter": {**right, "input_iter": fresh, "other_iter": Iterator(0)},
        }
        errors = {name: error_of(checkpointer, state) for name, state in wrong.items()}
        unmoved = fresh.position == 0
        asked = {**right, "input_iter": fresh}
        found, state = checkpointer.restore(step=5, state=asked)
        as_asked = all(
            leaf.sharding == spec.sharding
            for leaf, spec in zip(
                jax.tree.leaves({**state, "input_iter": None}),
                jax.tree.leaves({**right, "input_iter": None}),
                strict=True,
            )
        )
        same_kind = jax.tree.structure(state) == jax.tree.structure(asked)
        equal = all(
            np.asarray(mine.addressable_data(0)).tobytes()
            == np.asarray(own.addressable_data(0)).tobytes()
            for mine, own in zip(
                jax.tree.leaves({**state, "input_iter": None}),
                jax.tree.leaves({**state_at(5), "input_iter": None}),
                strict=True,
            )
        )
    return {
        "errors": errors,
        "unmoved": unmoved,
        "found": found,
        "exactly": [as_asked, same_kind, equal, type(found) is int],
        "iterator": [state["input_iter"] is fresh, fresh.is_at(5, world.process)],
    }


def one_process_fails(world: JobProcess) -> Any:
    """All fail together, with their iterators where they were, and all succeed when asked again."""
    checkpointer = build(world, "one_fails")
    with current_mesh(mesh()):
        save(checkpointer, 5, Iterator(world.process).at(5))
        kind = FailsOnce if world.process == 1 else Iterator
        iterator = kind(world.process)
        asked = {**specs(), "input_iter": iterator}
        first = error_of(checkpointer, asked)
        unmoved = iterator.position == 0
        without = error_of(checkpointer, specs())
        again, _ = checkpointer.restore(state=asked)
    return {
        "first": first[1],
        "named": "does not answer" in first[2],
        "unmoved": unmoved,
        "without": without[:2],
        "again": [again, iterator.is_at(5, world.process)],
    }


def policies_are_asked_once(world: JobProcess) -> Any:
    asked: list[Any] = []

    def best_so_far() -> Callable[..., bool]:
        best = [0.0]

        def is_better(*, step: int, evaler_summaries: dict[str, Any]) -> bool:
            asked.append([step, evaler_summaries])
            score = evaler_summaries.get("score")
            if score is None or score <= best[0]:
                return False
            best[0] = score
            return True

        return is_better

    checkpointer = build(
        world,
        "policies",
        local_save_policy=policy(never),
        save_policy=config_for_function(best_so_far),
        keep_last_n=10,
    )
    scores = [None, 0.5, 0.4, 0.9, None]
    with current_mesh(mesh()):
        for step, score in enumerate(scores):
            summaries = None if score is None else {"score": score}
            state = {**state_at(step), "input_iter": Iterator(world.process).at(step)}
            checkpointer.save(step=step, state=state, evaler_summaries=summaries)
            checkpointer.wait_until_finished()
        world.meet()
        steps = EmergencyCheckpointer.checkpoint_steps(checkpointer.config.dir)
        latest = EmergencyCheckpointer.latest_checkpoint_step(checkpointer.config.dir)
    return {"asked": asked, "steps": steps, "latest": latest}


def an_exception_in_the_loop(world: JobProcess) -> Any:
    """It passes, and what was saved is there for who starts again in the same process."""
    checkpointer = build(world, "exception")
    passed = False
    with current_mesh(mesh()):
        try:
            with checkpointer:
                save(checkpointer, 3, Iterator(world.process).at(3))
                raise KeyError("a fault in the trainer")
        except KeyError:
            passed = True
        world.meet()
        iterator = Iterator(world.process)
        found, _ = checkpointer.restore(state={**specs(), "input_iter": iterator})
    return {"passed": passed, "found": found, "right": iterator.is_at(3, world.process)}
