"""A host state that gives other bytes each time it is asked: both tiers keep one capture of it."""

from __future__ import annotations

import itertools

from world import World


class Drifting:
    """An iterator whose state holds something that differs in each: a time, a buffer."""

    def __init__(self) -> None:
        self.asked = itertools.count()
        self.state = b""

    def get_state(self) -> bytes:
        return b"%d" % next(self.asked)

    def set_state(self, state: bytes) -> None:
        self.state = state


def test_host_state_is_captured_once_for_both_tiers(world: World) -> None:
    with world.open_both() as checkpointer:
        drifting = Drifting()
        for step in (2, 4):
            assert checkpointer.save(step=step, state=world.state(step), host_state=drifting)
            checkpointer.wait_until_finished()
        checkpointer.check_for_errors()
        assert next(drifting.asked) == 2
    found: list[bytes] = []
    for _ in world.each_tier():
        with world.open_both() as checkpointer:
            restored = Drifting()
            assert checkpointer.restore(state=world.state(0), host_state=restored)[0] == 4
            found.append(restored.state)
    assert found == [b"1", b"1"]
