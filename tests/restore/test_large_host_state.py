"""A large host state, back from each tier and for readers of files."""

from __future__ import annotations

import contextlib

import pytest
from world import World, finish

from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk

LARGE = bytes(range(256)) * (17 << 12)  # of 17 MiB


class Buffered:
    """An iterator with a large shuffle buffer."""

    def __init__(self, buffer: bytes = b"") -> None:
        self.buffer = buffer

    def get_state(self) -> bytes:
        return self.buffer

    def set_state(self, state: bytes) -> None:
        self.buffer = state


@pytest.mark.dear
def test_large_host_state_returns_everywhere(world: World) -> None:
    with world.open_both() as checkpointer:
        data = Buffered(LARGE)
        assert checkpointer.save(step=2, state=world.state(2), host_state=data)
        finish(checkpointer)
        assert checkpointer.steps.describe(2).host_state == LARGE
    with contextlib.closing(ReadOnlyRamdisk(world.ramdisk, "run")) as reader:
        (held,) = reader.inventory().host_states
        document = reader.host_state_bytes(held.save, held.owner, held.count)
        assert document is not None
        assert len(document) > len(LARGE)
    for _ in world.each_tier():
        with world.open_both() as checkpointer:
            restored = Buffered()
            assert checkpointer.restore(state=world.state(0), host_state=restored)[0] == 2
            assert restored.buffer == LARGE
