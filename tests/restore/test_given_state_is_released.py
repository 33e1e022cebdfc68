"""A restore keeps nothing of the state that it was given: the devices need the memory at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from world import World, save_all


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No reference cycle is collected meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("source", ["nothing", "RAM", "storage"])
@pytest.mark.usefixtures("uncollected")
def test_given_state_is_gone_when_the_caller_drops_it(world: World, source: str) -> None:
    if source != "nothing":
        with world.open_both() as checkpointer:
            save_all(checkpointer, world, 2)
    if source == "storage":
        world.lose_ram()
    with world.open_both() as checkpointer:
        given: dict[str, Any] = world.state(0)
        leaves = [weakref.ref(leaf) for leaf in given.values() if hasattr(leaf, "sharding")]
        assert len(leaves) > 1
        step, restored = checkpointer.restore(state=given)
        assert step == (None if source == "nothing" else 2)
        del given, restored
        assert [leaf() for leaf in leaves if leaf() is not None] == []
