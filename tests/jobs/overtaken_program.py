"""An older life's change of step 20 is held up in a bucket while a newer life saves that step.

``overtaken`` says what came of it; ``test_overtaken_changes.py`` judges.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import orbax.checkpoint as ocp
from bucket_histories import (
    Work,
    control,
    each_history,
    error_of,
    or_error,
    plain_value,
    url,
)
from fake_gcs import FaultRule
from persistent_steps import (
    RUN_ID,
    complete_steps,
    life,
    save_over,
    value_in,
    value_of,
    write_tensors,
    writer_of,
)
from programs import Program, started

from emergency_ckpt.core.timeline import continued
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.calls import THREAD_NAME
from emergency_ckpt.storage.step_writer import StepWriter
from emergency_ckpt.types import SaveId

STEP = 20
PARENT = SaveId(10, life(1), RUN_ID)


def save_as_newer_life() -> None:
    """Go back to step 10 and save 20 again, in each directory that a line of stdin names."""
    newest = life(4)
    chain = continued(None, PARENT, newest)
    for line in sys.stdin:
        tier = PersistentTier(url(line.strip()))
        writer = writer_of(tier)
        try:
            save_over(tier, STEP, 21, newest, chain=chain, writer=writer)
        except PersistentTierError:  # the older life had claimed the place: the next save clears it
            save_over(tier, STEP, 21, newest, chain=chain, writer=writer)
        print("saved", flush=True)


def begin_as_newer_life() -> None:
    """The same, but for a life that ends before its commit of step 20."""

    def die(*_: object) -> None:
        raise PersistentTierError("save", f"step {STEP}", "this life has ended")

    StepWriter._commit = die
    for line in sys.stdin:
        tier = PersistentTier(url(line.strip()))
        chain = continued(None, PARENT, life(4))
        error_of(partial(save_over, tier, STEP, 21, life(4), chain=chain, writer=writer_of(tier)))
        print("saved", flush=True)


def removal(tier: PersistentTier) -> Work:
    return lambda: writer_of(tier).remove([STEP], life(2))


def clean_up(tier: PersistentTier) -> Work:
    return lambda: writer_of(tier).begin(life(2))


def place_needed(tier: PersistentTier) -> Work:
    writer = writer_of(tier)
    writer.begin(life(2))
    return lambda: writer.make_room(STEP, "saved anew")


def rollback(tier: PersistentTier) -> Work:
    return lambda: writer_of(tier).begin(life(2), continued(None, PARENT, life(2)))


def bring_back(tier: PersistentTier) -> Work:
    """Continue from step 20, which an earlier life has left."""
    left = SaveId(STEP, life(1), RUN_ID)
    return lambda: writer_of(tier).begin(life(3), continued(None, left, life(3)))


def withdrawal(tier: PersistentTier) -> Work:
    """Begin to write tensors, and give that up; the work is what is done when storage answers."""
    hasty, before = tier.with_timeout(1.0), set(threading.enumerate())
    claim = FaultRule(kind="hold", method="POST", path=f"*{STEP}*_CHECKPOINT_METADATA*")
    rule = control().add_fault(claim)
    error = error_of(lambda: write_tensors(hasty, SaveId(STEP, life(2), RUN_ID), 22))
    assert "no answer in time" in error, error
    (late,) = (
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith(THREAD_NAME)
    )

    def go_on() -> None:
        control().remove_fault(rule)
        late.join()

    return go_on


WORKS = {
    each.__name__: each
    for each in (removal, clean_up, place_needed, rollback, bring_back, withdrawal)
}


def prepare(what: str) -> None:
    tier, writer = PersistentTier(url("before")), writer_of(PersistentTier(url("before")))
    save_over(tier, PARENT.step, PARENT.step, life(1), writer=writer)
    if what == "clean_up":
        tier.write_document(STEP, 0, 1, b"{}")
        write_tensors(tier, SaveId(STEP, life(1), RUN_ID), 20)
    elif what != "withdrawal":
        save_over(tier, STEP, 20, life(1), writer=writer)
    if what == "bring_back":
        writer_of(tier).begin(life(2), continued(None, PARENT, life(2)))


def overtaken(what: str, newer_life: str) -> list[dict[str, Any]]:
    """Storage holds up the k-th request of the older life, for each k until there is none.

    Of each: what the older life is told, and what is seen then and after the next life's start.
    """
    prepare(what)
    with started(__file__, newer_life) as newer:
        at = partial(overtaken_at, what, newer)
        return each_history("overtaken", at, "is_held", "before")


def overtaken_at(what: str, newer: Program, run: str, k: int) -> dict[str, Any]:
    tier = PersistentTier(url(run))
    work = WORKS[what](tier)
    rule = control().add_fault(FaultRule(kind="hold", skip=k, count=1))
    with ThreadPoolExecutor(1) as pool:
        older = pool.submit(error_of, work)
        while not (older.done() or hits(rule)):
            time.sleep(0.005)
        is_held = hits(rule)
        if not is_held:
            control().remove_fault(rule)  # it is through, and the rule is not for the newer life
        newer.say(run)
        assert newer.line() == "saved"
        if is_held:
            control().remove_fault(rule)
        told = older.result()
    seen = look(run)
    writer_of(tier).begin(life(5))
    return {"is_held": is_held, "told": told, "seen": seen, "then": look(run)}


def hits(rule: int) -> bool:
    return any(each.hit for each in control().fault_states() if each.rule_id == rule)


def look(run: str) -> dict[str, Any]:
    """The steps that count, ours and plain Orbax's, with what step 20 is, and what is aside."""
    tier = PersistentTier(url(run))
    view = tier.found.view()
    aside = view.aside(STEP)
    found = None if aside is None else tier.found.inspect(view, aside)
    return {
        "ours": complete_steps(tier),
        "value": or_error(lambda: value_of(tier, STEP)),
        "aside": found and or_error(lambda: value_in(tier, found)),
        "plain": plain(run),
    }


def plain(run: str) -> Any:
    with ocp.CheckpointManager(url(run)) as manager:
        steps = sorted(manager.all_steps())
        if STEP not in steps:
            return steps
        try:
            return [*steps, plain_value(manager, STEP)]
        except (ValueError, FileNotFoundError) as error:
            return str(error)[:200]


if __name__ == "__main__":
    lives = {each.__name__: each for each in (save_as_newer_life, begin_as_newer_life)}
    if sys.argv[1] in lives:
        lives[sys.argv[1]]()
    else:
        print(json.dumps(overtaken(*sys.argv[1:])))
