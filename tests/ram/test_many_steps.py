"""A local tier that keeps many steps."""

from __future__ import annotations

from pathlib import Path

from tiers_support import complete_save, document, open_tier, save_id


def test_host_states_of_as_many_steps_as_are_kept(ramdisk: Path) -> None:
    kept = 64
    tier = open_tier(ramdisk, slots=kept + 1)
    for step in range(kept):
        tier.publish_host_state(save_id(step), 0, 4, document(step))
        complete_save(tier, step)
    assert [held.save.step for held in tier.held()[0]] == list(range(kept))
    assert [held.save.step for held in tier.held()[1]] == list(range(kept))
