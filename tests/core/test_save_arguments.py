"""What no save can be given is refused at once."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from emergency_ckpt.core.save_decision import MAX_STEP, check_metrics, step_number
from emergency_ckpt.errors import InvalidState


@pytest.mark.parametrize("step", [0, 7, MAX_STEP, np.int64(7), np.uint8(7), jnp.int32(7)])
def test_whole_numbers_of_any_kind_are_steps(step: Any) -> None:
    number = step_number("save", step)
    assert type(number) is int
    assert number == int(step)


@pytest.mark.parametrize(
    "step",
    [-1, MAX_STEP + 1, 10**30, True, 10.0, np.float32(1), None, "3", b"1", [1], np.arange(2)],
    ids=str,
)
def test_nothing_else_is(step: Any) -> None:
    with pytest.raises(InvalidState, match="not the number of a step"):
        step_number("save", step)


def test_metrics_are_json_values() -> None:
    check_metrics({"loss": 1.5, "more": {"a": [1, None, "x"]}})
    for bad in ({"loss": np.float32(1)}, {"loss": jnp.float32(1)}, {"x": {1, 2}}, {(1, 2): 3}):
        with pytest.raises(InvalidState, match="not JSON values"):
            check_metrics(bad)
