"""Saves into a bucket, each with a second event; ``test_pairs_in_a_bucket.py`` judges."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from fake_gcs import FaultRule, GcsControl
from persistent_steps import complete_steps, life, save_over, value_of, writer_of

from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage import PersistentTier

STEP = 7
WAIT_S = 60.0
RUN = "gs://bucket/{}"

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


def control() -> GcsControl:
    return GcsControl(os.environ["STORAGE_EMULATOR_HOST"])


def changing(rule: FaultRule) -> FaultRule:
    return FaultRule(**{**{f: getattr(rule, f) for f in rule.__struct_fields__}, "method": "POST"})


def save(run: str, value: int, number: int) -> str:
    """The error of a save by the life of this number, or nothing."""
    try:
        save_over(PersistentTier(run, timeout_s=WAIT_S), STEP, value, life(number))
    except CheckpointError as error:
        return str(error)
    return ""


def look(run: str) -> dict[str, Any]:
    """What plain Orbax and our readers have as the step: a value each, or None."""
    tier = PersistentTier(run)
    with ocp.CheckpointManager(run) as manager:
        listed = STEP in manager.all_steps()
        plain = None if not listed else readable(lambda: plain_value(manager))
    ours = None if STEP not in complete_steps(tier) else readable(lambda: value_of(tier, STEP))
    return {"plain": plain, "ours": ours}


def plain_value(manager: ocp.CheckpointManager) -> int:
    found = manager.restore(STEP, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    (value,) = set(np.asarray(found.state["w"]).tolist())
    return value


def readable(read: Callable[[], int]) -> int | str:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - of Orbax, of any type: the test fails with it
        return f"{type(error).__name__}: {error}"[:300]


def ended(runs: str) -> list[dict[str, Any]]:
    """Storage takes k changes of the save and no more, for each k: as if the process had died."""
    seen: list[dict[str, Any]] = []
    while not seen or seen[-1]["error"]:
        run = f"{runs}/{len(seen)}"
        rule = FaultRule(kind="status", status_code=403, method="[DP]*", skip=len(seen))
        with control().fault(rule):
            error = save(run, 1, 1)
        found = {"error": error, "marked": is_marked(run), **look(run)}
        seen.append({**found, "again": save(run, 2, 2), "then": look(run)})
    return seen


def is_marked(run: str) -> bool:
    name = f"{run.removeprefix('gs://bucket/')}/host_state/{STEP}/marker.json"
    return name in control().object_names("bucket", name)


def remove(run: str, number: int) -> None:
    """As another life does that finds a save which did not end: it clears that first."""
    writer = writer_of(PersistentTier(run))
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
    print(
        json.dumps(
            {
                "ended": ended(RUN.format("ended")),
                "twin": {
                    name: twin(RUN.format(f"twin-{name}"), rule) for name, rule in PAUSES.items()
                },
                "older": {
                    name: older_twin(RUN.format(f"older-{name}"), rule)
                    for name, rule in PAUSES.items()
                },
                "removed": {
                    name: removed(RUN.format(f"removed-{name}"), rule)
                    for name, rule in PAUSES.items()
                },
            }
        )
    )


if __name__ == "__main__":
    main()
