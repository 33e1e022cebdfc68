"""Storage that is silent at a restore: RAM is enough, unless storage is known to have more."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from world import STORAGE, World, same, save_all

from emergency_ckpt import start
from emergency_ckpt.cluster.shard_source import ProcessHoldings
from emergency_ckpt.errors import PersistentTierError, TransferError
from emergency_ckpt.restore import holders
from emergency_ckpt.storage import StorageDirectory


def unreachable(*_: Any, **__: Any) -> Any:
    raise ConnectionError("no route to storage")


@pytest.fixture
def ahead(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """RAM has step 1; saves to RAM then failed for a life, which stored steps 2 and 4."""
    monkeypatch.setattr(start, "SOON_S", 0.5)  # else each restore ends half a minute later
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 1)
    with world.open_both(**STORAGE) as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 1
        save_all(checkpointer, world, 2, 4)
    return world


def test_older_step_of_ram_takes_no_stored_ones_place(
    ahead: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, ahead.open_both(total_timeout_s=8.0) as checkpointer:
        patch.setattr(StorageDirectory, "forget_listings", unreachable)
        with pytest.raises(PersistentTierError, match="no route to storage"):
            checkpointer.restore(state=ahead.state(0))
        step, _ = checkpointer.restore(1, state=ahead.state(0))
        assert step == 1, "who asks for it gets it"
    with ahead.open_both() as checkpointer:
        step, state = checkpointer.restore(state=ahead.state(0))
        assert step == 4
        assert same(state, ahead.state(4))


def test_late_manifest_takes_no_stored_step_away(
    ahead: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sharding needs the manifest, whose holder answers only when it is asked for long."""
    state = ahead.state(0)
    state["w"] = jax.device_put(state["w"], NamedSharding(ahead.mesh, P("slice")))
    fetch, failures = holders.fetch_contents, iter(range(3))

    def late(*args: Any) -> Any:
        if next(failures, None) is not None:
            raise TransferError("read", "its holder", "no route to it")
        return fetch(*args)

    with monkeypatch.context() as patch, ahead.open_both(total_timeout_s=20.0) as checkpointer:
        patch.setattr(StorageDirectory, "forget_listings", unreachable)
        patch.setattr(ProcessHoldings, "contents", lambda *_: None)
        patch.setattr(holders, "fetch_contents", late)
        with pytest.raises(PersistentTierError, match="no route to storage"):
            checkpointer.restore(state=state)
    assert next(failures, None) is None


def test_step_that_was_left_behind_is_not_waited_for(
    ahead: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user went back to step 1, and the job saved after it."""
    with ahead.open_both(save_every=0) as checkpointer:
        checkpointer.restore(1, state=ahead.state(0))
        save_all(checkpointer, ahead, 3)
    with monkeypatch.context() as patch, ahead.open_both(total_timeout_s=8.0) as checkpointer:
        patch.setattr(StorageDirectory, "forget_listings", unreachable)
        assert checkpointer.restore(state=ahead.state(0))[0] == 3
