"""Every name that is not refused: what is saved under it is read back, from both tiers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from world import World, finish, same

from emergency_ckpt.errors import InvalidState

KEYS = [
    *["plain", "a b", " ", "", "a.b", "..", ".", "-", "None", "0", "default", ".zarray"],
    *["a%20b", "a%b", "a#b", "a?b", "a|b", "a\\b", "*", "[x]", "{x}", "$HOME", "~", "@", "a&b=c"],
    *["x/y", "//x", "a/", "/a", "a//b", "file://x", "c:d", "'q'", '"q"', "a,b;c"],
    *["\u00e9", "\u65e5\u672c", "\u202e", "a\nb", "a\x00b", "\x7f", "x" * 1000],
    *["_METADATA", "manifest.ocdbt", "__array__"],
]
DIRECTORY = "a%20b %#|\u00e9\u65e5 'x' \"y\" ~$&=,;{}:@ 100%"


def state_of(step: int) -> dict[str, Any]:
    return {
        "top": {key: jnp.full(3, number + step) for number, key in enumerate(KEYS)},
        "below": {key: {key: np.arange(2) + number} for number, key in enumerate(KEYS)},
        "number": {key: number + 0.5 * step for number, key in enumerate(KEYS)},
        "/": np.full(2, step),
    }


@pytest.mark.dear
def test_every_name_and_path_is_read_back(world: World) -> None:
    world.persistent = world.persistent.parent / DIRECTORY
    world.ramdisk = world.ramdisk.parent / f"ram {DIRECTORY}"
    with world.open_both(save_every=1) as checkpointer:
        assert checkpointer.save(step=1, state=state_of(1), host_state={"at": 1})
        finish(checkpointer)
    for _ in world.each_tier():
        with world.open_both(save_every=1) as checkpointer:
            host: dict[str, int] = {}
            step, state = checkpointer.restore(state=state_of(0), host_state=host)
            assert (step, host) == (1, {"at": 1})
            assert same(state, state_of(1))
    with ocp.CheckpointManager(world.persistent) as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(state_of(0)))
        plain = manager.restore(1, args=args)
    assert same(plain.state, state_of(1))


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1.0}, "a.b": 2.0},
        {"a": {"b.c": np.zeros(3)}, "a.b": {"c": np.ones(3)}},
        {"a": np.zeros(2), "a/": np.ones(2)},
        {"x": [jnp.zeros(2)], "x.0": jnp.zeros((0, 2))},
    ],
)
def test_save_of_leaves_stored_in_one_place_is_refused(world: World, state: Any) -> None:
    with world.open_both(save_every=1) as checkpointer:
        with pytest.raises(InvalidState, match="one over the other"):
            checkpointer.save(step=1, state=state)
        assert not (world.persistent / "1").exists()
        assert checkpointer.all_steps() == []
    with world.open() as checkpointer:  # RAM alone knows them by their own names
        assert checkpointer.save(step=1, state=state)
        checkpointer.wait_until_finished()
        assert same(checkpointer.restore(state=state)[1], state)
