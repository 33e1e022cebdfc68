"""A trainer that treats its checkpointer as axlearn's ``SpmdTrainer`` does. Trains next to nothing.

``restore`` before anything else, once more with the iterator added or removed when that raises;
``save`` at step 0 when nothing was restored; then, inside the checkpointer's context, after every
step. The state is donated to each step. ``wait_until_finished`` is never called, and ``stop`` only
by leaving the context: not at all when there is nothing left to train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axlearn.common.checkpointer import BaseCheckpointer
from axlearn.common.utils import TensorSpec, VDict, current_mesh

WIDTH = 8


@dataclasses.dataclass(kw_only=True)
class TrainerConfig:
    """``dataset``: makes a fresh iterator over this process's rows of ``WIDTH`` numbers."""

    dir: str
    mesh: jax.sharding.Mesh
    checkpointer: Any
    dataset: Callable[[], Iterator[Any]]
    max_step: int
    save_input_iterator: bool = True


def _specs() -> dict[str, Any]:
    """Shapes are lists and dtypes scalar types; None is no leaf; optimizers have namedtuples."""

    def weights() -> dict[str, Any]:
        return {
            "layers": VDict(w=TensorSpec([WIDTH, WIDTH], jnp.float32, P(None, "model"))),
            "scale": TensorSpec([], jnp.float32),
            "bias": None,
        }

    count = TensorSpec([], jnp.int32)
    adam = optax.ScaleByAdamState(count=count, mu=weights(), nu=weights())
    return {
        "prng_key": TensorSpec([4], jnp.uint32, P(None)),
        "model": weights(),
        "learner": {"optimizer": (adam, optax.EmptyState(), optax.EmptyState()), "ema": None},
    }


class SpmdTrainer:
    """Built and run on every process."""

    def __init__(self, cfg: TrainerConfig) -> None:
        self._cfg = cfg
        self.step: int | None = None
        self.restores = 0
        self.losses: list[float] = []
        if hasattr(cfg.checkpointer, "trainer_dir") and not isinstance(
            cfg.checkpointer.trainer_dir, str
        ):
            cfg.checkpointer.trainer_dir = cfg.dir  # the launcher does this
        cfg.checkpointer.dir = f"{cfg.dir}/checkpoints"
        cfg.checkpointer.name = "checkpointer"
        with current_mesh(cfg.mesh):
            self.checkpointer: BaseCheckpointer = cfg.checkpointer.instantiate(parent=None)
        self._optimizer = optax.adam(0.1)
        self._input_iter = iter(cfg.dataset())
        self.state: dict[str, Any] = {}
        self._train_step = jax.jit(self._one_step, donate_argnums=0)

    def run(self) -> bool:
        """Train to ``max_step``; whether there was anything to do."""
        with current_mesh(self._cfg.mesh):
            self._restore()
            if self.step is None:
                self.step, self.state = 0, self._initial_state()
                self._save()
            if self.step >= self._cfg.max_step:
                return False
            with self.checkpointer:
                while self.step < self._cfg.max_step:
                    batch = self._global_batch(np.asarray(next(self._input_iter), np.float32))
                    self.step += 1
                    self.state, loss = self._train_step(self.state, batch)
                    self.losses.append(float(loss))
                    self._save()
        return True

    def _restore(self) -> None:
        specs, iterator = _specs(), iter(self._cfg.dataset())
        with_iterator = self._cfg.save_input_iterator
        try:
            step, state = self._restore_once(specs, iterator, with_iterator)
        except Exception as error:  # noqa: BLE001 - as the trainer does
            logging.warning("restore with the iterator %s failed: %s", with_iterator, error)
            with_iterator = not with_iterator
            step, state = self._restore_once(specs, iterator, with_iterator)
        if step is None:
            return
        if self._cfg.save_input_iterator and "input_iter" in state:
            self._input_iter = state.pop("input_iter")
        state.pop("input_iter", None)
        self.step, self.state = step, state

    def _restore_once(self, specs: Any, iterator: Any, with_iterator: bool) -> Any:
        self.restores += 1
        asked = {**specs, "input_iter": iterator} if with_iterator else dict(specs)
        return self.checkpointer.restore(step=None, state=asked)

    def _save(self) -> None:
        state = dict(self.state)
        if self._cfg.save_input_iterator:
            state["input_iter"] = self._input_iter
        assert self.step is not None
        self.checkpointer.save(step=self.step, state=state, evaler_summaries=None)

    def _initial_state(self) -> dict[str, Any]:
        key = np.arange(4, dtype=np.uint32)
        draws = np.random.default_rng(7)

        def value(spec: TensorSpec) -> jax.Array:
            host = draws.normal(size=tuple(spec.shape)).astype(np.float32)
            sharding: Any = spec.sharding
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        model = jax.tree.map(value, _specs()["model"])
        optimizer = jax.jit(
            self._optimizer.init,
            out_shardings=jax.tree.map(
                lambda spec: spec.sharding, (*_specs()["learner"]["optimizer"][:2],)
            ),
        )(model)
        replicated = NamedSharding(self._cfg.mesh, P(None))
        keys = jax.make_array_from_callback((4,), replicated, lambda index: key[index])
        return {
            "prng_key": keys,
            "model": model,
            "learner": {"optimizer": (*optimizer, optax.EmptyState()), "ema": None},
        }

    def _global_batch(self, rows: np.ndarray) -> jax.Array:
        sharding = NamedSharding(self._cfg.mesh, P(self._cfg.mesh.axis_names))
        return jax.make_array_from_process_local_data(sharding, rows)

    def _one_step(self, state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], Any]:
        def loss_of(model: dict[str, Any]) -> jax.Array:
            return jnp.mean((batch @ model["layers"]["w"] * model["scale"] - 1.0) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(state["model"])
        *chain, last = state["learner"]["optimizer"]
        updates, chain = self._optimizer.update(gradients, tuple(chain), state["model"])
        model = optax.apply_updates(state["model"], updates)
        learner = {"optimizer": (*chain, last), "ema": None}
        return {"prng_key": state["prng_key"] + 1, "model": model, "learner": learner}, loss
