"""Saves into a bucket, each with a second event; ``test_pairs_in_a_bucket.py`` judges."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from bucket_histories import control, cut, each_history, error_of, or_error, plain_value, url
from fake_gcs import FaultRule
from persistent_steps import complete_steps, life, save_over, value_of, writer_of

from emergency_ckpt.storage import PersistentTier

STEP = 7
WAIT_S = 60.0

PAUSES = {
    "data": FaultRule(kind="trickle", bytes_per_s=1, target="*/state/d/*", count=1),
    "manifest": FaultRule(kind="trickle", bytes_per_s=1, target="*/state/manifest.*", count=1),
    "metadata": FaultRule(
        kind="trickle", bytes_per_s=1, target="*/_CHECKPOINT_METADATA", skip=1, count=1
    ),
    "item": FaultRule(kind="trickle", bytes_per_s=1, target="*/state/commit_*", count=1),
    "step": FaultRule(kind="trickle", bytes_per_s=1, target=f"*/{STEP}/commit_*", count=1),
}
"""Uploads that stand still, by what is written."""


def changing(rule: FaultRule) -> FaultRule:
    return FaultRule(**{**{f: getattr(rule, f) for f in rule.__struct_fields__}, "method": "POST"})


def save(run: str, value: int, number: int) -> str:
    """The error of a save by the life of this number, or nothing."""
    tier = PersistentTier(url(run), timeout_s=WAIT_S)
    return error_of(lambda: save_over(tier, STEP, value, life(number)))


def look(run: str) -> dict[str, Any]:
    """What plain Orbax and our readers have as the step: a value each, or None."""
    tier = PersistentTier(url(run))
    # Errors of Orbax are of any type: the test fails with them.
    with ocp.CheckpointManager(url(run)) as manager:
        listed = STEP in manager.all_steps()
        plain = or_error(lambda: plain_value(manager, STEP), Exception) if listed else None
    whole = STEP in complete_steps(tier)
    ours = or_error(lambda: value_of(tier, STEP), Exception) if whole else None
    return {"plain": plain, "ours": ours}


def ended(run: str, k: int) -> dict[str, Any]:
    """Storage takes k changes of the save and no more."""
    tier = PersistentTier(url(run), timeout_s=WAIT_S)
    error = cut(lambda: save_over(tier, STEP, 1, life(1)), k)
    found = {"error": error, "marked": is_marked(run), **look(run)}
    return {**found, "again": save(run, 2, 2), "then": look(run)}


def is_marked(run: str) -> bool:
    name = f"{run}/host_state/{STEP}/marker.json"
    return name in control().object_names("bucket", name)


def remove(run: str, number: int) -> None:
    """As another life does that finds a save which did not end: it clears that first."""
    writer = writer_of(PersistentTier(url(run)))
    writer.begin(life(number))
    writer.remove([STEP], life(number))


def meanwhile(
    run: str, pause: FaultRule, act: Callable[[], object], number: int = 1
) -> dict[str, Any]:
    """A save that stands still at one upload, until ``act`` is done."""
    errors: list[str] = []
    rule_id = control().add_fault(changing(pause))
    saving = threading.Thread(target=lambda: errors.append(save(run, 1, number)))
    saving.start()
    deadline_s = time.monotonic() + WAIT_S
    while not any(each.hit for each in control().fault_states()):
        assert time.monotonic() < deadline_s, errors
        time.sleep(0.01)
    act()
    control().remove_fault(rule_id)
    saving.join(WAIT_S)
    assert not saving.is_alive()
    return {"error": errors[0], **look(run)}


def twin(run: str, pause: FaultRule) -> dict[str, Any]:
    errors: list[str] = []
    found = meanwhile(run, pause, lambda: errors.append(save(run, 2, 2)))
    return {**found, "error of the twin": errors[0]}


def older_twin(run: str, pause: FaultRule) -> dict[str, Any]:
    """The save that stands still is of the newer life."""
    errors: list[str] = []
    found = meanwhile(run, pause, lambda: errors.append(save(run, 2, 1)), 2)
    return {**found, "error of the twin": errors[0]}


def removed(run: str, pause: FaultRule) -> dict[str, Any]:
    found = meanwhile(run, pause, lambda: remove(run, 2))
    return {**found, "again": save(run, 2, 3), "then": look(run)}


def main() -> None:
    found: dict[str, Any] = {"ended": each_history("ended", ended, "error")}
    for what in (twin, older_twin, removed):
        runs = {name: f"{what.__name__}-{name}" for name in PAUSES}
        found[what.__name__] = {name: what(run, PAUSES[name]) for name, run in runs.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
