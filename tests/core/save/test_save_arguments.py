"""What no save can be given is refused at once."""

from __future__ import annotations

import enum
import json
import os
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from emergency_ckpt.core.limits import MAX_STEP
from emergency_ckpt.core.save.save_rules import plain_metrics, plain_orbax, step_number, wanted_step
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.types import OrbaxStep


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


@pytest.mark.parametrize("step", [None, "latest"])
def test_wanted_step_latest_means_the_newest(step: Any) -> None:
    assert wanted_step("restore", step) is None


@pytest.mark.parametrize("step", [-1, "newest", "7", {"w": np.zeros(3)}, 7.5], ids=str)
def test_wanted_step_refuses_what_is_no_step(step: Any) -> None:
    with pytest.raises(InvalidState, match="None or 'latest'"):
        wanted_step("restore", step)


def test_metrics_become_json_values() -> None:
    plain = {"loss": 1.5, "more": {"a": [1, None, "x"]}}
    assert plain_metrics(plain) == plain
    mine = {"loss": np.float32(1.5), "more": {"a": (jnp.int32(1), None, "x")}}
    assert json.dumps(plain_metrics(mine)) == json.dumps(plain)
    assert plain_metrics({"each": np.array([1, 2]), "yes": np.bool_(1)}) == {
        "each": [1, 2],
        "yes": True,
    }
    assert plain_metrics(jnp.bfloat16(1.5)) == 1.5


def test_metrics_that_are_no_json_values_are_refused() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    mixed = {1: 0.5, "loss": 0.5}
    name = os.fsdecode(b"\xff")
    others = {"x": {1, 2}}, {(1, 2): 3}, {"x": 1j}, {"x": np.array([b"1"])}, {"file": name}
    for bad in (mixed, endless, *others):
        with pytest.raises(InvalidState, match="not JSON values"):
            plain_metrics(bad)


class _Loss(float):
    """As a logger's meter is."""


class _Count(int):
    pass


class _Split(enum.StrEnum):
    EVAL = "eval"


def test_metrics_of_subclasses_become_plain_values() -> None:
    """The documents are written by msgspec, which takes no subclass of a number or a text."""
    mine = {_Split.EVAL: {"loss": _Loss(0.5), "count": [_Count(3)], "split": _Split.EVAL}}
    plain = plain_metrics(mine)
    assert msgspec.json.encode(plain) == b'{"eval":{"loss":0.5,"count":[3],"split":"eval"}}'
    assert type(plain["eval"]["loss"]) is float


def test_values_for_orbax_are_checked_like_metrics() -> None:
    mine = OrbaxStep(metrics={"loss": _Loss(0.5)}, custom_metadata={"count": _Count(3)})
    assert msgspec.json.encode(plain_orbax(mine)) == (
        b'{"metrics":{"loss":0.5},"custom_metadata":{"count":3}}'
    )
    with pytest.raises(InvalidState, match="custom_metadata"):
        plain_orbax(OrbaxStep(custom_metadata={"names": {"a"}}))
