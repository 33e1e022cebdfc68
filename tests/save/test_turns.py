"""Saves to RAM that come too fast: the leader leaves some out, for all, and says so once."""

from __future__ import annotations

import re
import threading

from places import VERIFICATION
from programs import printed
from world import LONG_S, World, finish, logged, save

from emergency_ckpt.events import Event
from emergency_ckpt.save.turns import Turns
from emergency_ckpt.types import SaveId

SLOW_WRITES = VERIFICATION / "simulation" / "slow_writes.py"


def save_id(step: int, number: int = 2) -> SaveId:
    return SaveId(step=step, incarnation=f"{number:012d}-life", run_id="run")


def test_slow_processes_do_not_take_turns_at_leaving_out() -> None:
    """Processes that left saves out on their own did so for ever: only the first was complete."""
    assert printed(SLOW_WRITES, 10, 30, env={"PYTHONHASHSEED": "0"}).strip() == "{'jobs': 10}"


def test_others_leave_out_what_the_leader_has_left_out() -> None:
    leader, other = Turns(leads=True), Turns(leads=False)
    assert leader.limit_s(120.0) < other.limit_s(120.0) == 120.0
    leader.begin()
    assert leader.leave_out(save_id(20))
    assert not other.leave_out(save_id(20)), "the leader alone does"
    other.hear(leader.announce(ends_wait=True))
    left_out = {step: other.is_left_out(save_id(step)) for step in (10, 20, 30)}
    assert left_out == {10: True, 20: True, 30: False}
    assert not other.is_left_out(save_id(20, 3)), "of a later life"


def test_leader_leaves_out_nothing_that_others_begin() -> None:
    """They begin the next save as soon as they know the decision on the one before."""
    leader = Turns(leads=True)
    leader.begin()
    assert leader.announce(ends_wait=True) is None
    assert not leader.leave_out(save_id(20))
    leader.begin()
    assert leader.leave_out(save_id(30))


def test_save_that_is_left_out_is_one_warning_and_no_error(world: World) -> None:
    go_on = threading.Event()

    def listen(event: Event) -> None:
        world.events.append(event)
        if event.point == "save.stage.copied":
            assert go_on.wait(LONG_S)

    with logged() as lines, world.open(on_event=listen, save_timeout_s=0.5) as checkpointer:
        assert save(checkpointer, world, 1)
        try:
            for step in (2, 3):
                assert not save(checkpointer, world, step)
        finally:
            go_on.set()
        finish(checkpointer)
        assert checkpointer.failed_saves == 0
    skipped = [event.fields["step"] for event in world.named("save.skipped", cause="busy")]
    assert skipped == [2, 3]
    (line,) = [line for line in lines if "is not saved to RAM" in line]
    assert re.match(
        r"step 2 is not saved to RAM: the save of step 1 has taken .* s so far, and saves are due"
        r" every .* s;",
        line,
    )
