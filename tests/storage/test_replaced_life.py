"""A life goes on beside the next one, as after a pause of its machine: it changes nothing any more.

Its threads share one writer. A refusal in one of them, which is only logged, stops the others too.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from persistent_steps import complete_steps, life, save_over, value_of, write, writer_of

from emergency_ckpt.background import Failures
from emergency_ckpt.core.step_log import Table
from emergency_ckpt.errors import DirectoryInUse, PersistentTierError
from emergency_ckpt.save.persistent.retention import Preservation
from emergency_ckpt.storage import PersistentTier, directory_writer
from emergency_ckpt.storage.pinned import Pinned

LONG_S = 60.0


@pytest.fixture
def tier(tmp_path: Path) -> PersistentTier:
    tier = PersistentTier(str(tmp_path / "run"))
    tier.create()
    return tier


def newest_version(tier: PersistentTier) -> Table:
    table = tier.found.log.read().table
    assert table is not None
    return table


def test_refused_removal_stops_a_publication_too(tier: PersistentTier) -> None:
    old, new = writer_of(tier), writer_of(tier)
    save_over(tier, 20, 1, life(1), writer=old)
    entry = write(tier, 30, 1, life(1))
    new.hold(life(2))
    with pytest.raises(DirectoryInUse):
        old.retire(20)  # in the thread of retention
    with pytest.raises(DirectoryInUse):
        old.publish(entry, None)  # in the thread of the save
    assert newest_version(tier).incarnation == life(2)
    assert newest_version(tier).of(30) is None
    assert value_of(tier, 20) == 1


def test_retention_removes_nothing_in_the_name_of_the_next_life(tier: PersistentTier) -> None:
    old = writer_of(tier)
    for step in (10, 20, 30):
        save_over(tier, step, 1, life(1), writer=old)
    retention = Preservation(
        old, Failures(), policy=None, keep_last_n=1, keep_every_n_steps=None, timeout_s=LONG_S
    )
    writer_of(tier).hold(life(2))
    with contextlib.suppress(DirectoryInUse):
        old.check()  # reads that the next life is on record
    retention.after_save(30)
    assert retention.wait_idle(LONG_S)
    retention.stop(LONG_S)
    assert complete_steps(tier) == [10, 20, 30]


def test_overtaken_writer_claims_the_directory_anew(
    tier: PersistentTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the opening of files and the look at the log an older life wrote a version, late."""
    own = writer_of(tier)
    save_over(tier, 10, 1, life(2), writer=own)

    def pin(*args: Any) -> Pinned:
        table = newest_version(tier)
        late = msgspec.structs.replace(table, number=table.number + 1, incarnation=life(1))
        assert tier.found.log.append(late)
        return Pinned(*args)

    with monkeypatch.context() as patch:
        patch.setattr(directory_writer, "Pinned", pin)
        with pytest.raises(PersistentTierError, match="another writer of this life"):
            own.remove([10], life(2))
    own.hold(life(2))
    assert newest_version(tier).incarnation == life(2)
