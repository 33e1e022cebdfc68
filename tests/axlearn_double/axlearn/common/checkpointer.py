"""What a trainer expects of a checkpointer, and what tools expect of its directory."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import jax.numpy as jnp

from axlearn.common.config import (
    REQUIRED,
    InstantiableConfig,
    Required,
    config_class,
    config_for_function,
)
from axlearn.common.module import Module
from axlearn.common.utils import TensorSpec


class CheckpointPolicy(Protocol):
    """Says at each step whether to save. Called with these keywords."""

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool: ...


def every_n_steps_policy(n: int = 1, *, min_step: int = 1) -> CheckpointPolicy:
    """At the multiples of ``n``, from ``min_step`` on."""

    def is_due(*, step: int, evaler_summaries: dict[str, Any]) -> bool:
        del evaler_summaries
        return step >= min_step and step % n == 0

    return is_due


class BaseCheckpointer(Module):
    """To be entered before the loop of training; leaving it stops it."""

    @config_class
    class Config(Module.Config):
        """``dir``: of the checkpoints. ``save_policy``: builds a ``CheckpointPolicy``."""

        dir: Required[str] = REQUIRED
        save_policy: InstantiableConfig[CheckpointPolicy] = config_for_function(
            every_n_steps_policy
        )

    def __init__(self, cfg: Any, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        self._within_context = False

    @classmethod
    def checkpoint_paths(cls, base_dir: str) -> list[str]:
        """Directories of the whole steps."""
        raise NotImplementedError(cls)

    @classmethod
    def checkpoint_steps(cls, base_dir: str) -> list[int]:
        """The whole steps."""
        raise NotImplementedError(cls)

    @classmethod
    def latest_checkpoint_step(cls, base_dir: str) -> int:
        """The newest of them."""
        return max(cls.checkpoint_steps(base_dir))

    def __enter__(self) -> None:
        if self._within_context:
            raise ValueError("entered twice")
        self._within_context = True

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(has_exception=exc_type is not None)
        self._within_context = False

    def save(
        self, *, step: int, state: Any, evaler_summaries: dict[str, Any] | None = None
    ) -> None:
        """Save if the policy says so."""
        raise NotImplementedError(type(self))

    def restore(self, *, step: int | None = None, state: Any) -> tuple[int | None, Any]:
        """(step, state), or (None, ``state``) when there is nothing."""
        raise NotImplementedError(type(self))

    def wait_until_finished(self) -> None:
        """Return when no save is under way."""
        raise NotImplementedError(type(self))

    def stop(self, *, has_exception: bool = False) -> None:
        """Finish and let go."""
        raise NotImplementedError(type(self))


_DTYPES: dict[str, Callable[..., Any]] = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "int32": jnp.int32,
    "uint32": jnp.uint32,
}


def indexed_steps(base_dir: str) -> list[str]:
    """What the tools take for whole steps: directories with an ``index``."""
    return sorted(str(path.parent) for path in Path(base_dir).glob("step_*/index"))


def read_state_spec(ckpt_dir: str) -> dict[str, Any]:
    """The arrays that an ``index`` lists, as nested specs, as the tools read them."""
    spec: dict[str, Any] = {}
    for path, value in json.loads((Path(ckpt_dir) / "index").read_text()):
        if not isinstance(value, dict):
            continue  # the step, or an iterator
        node = spec
        *parents, name = path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        shape = tuple(ast.literal_eval(value["shape"]))
        node[name] = TensorSpec(shape=shape, dtype=_DTYPES[value["dtype"]])
    return spec
