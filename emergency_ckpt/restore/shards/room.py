"""Room in the ramdisk for what a restore writes: what it may still need is given up last."""

from __future__ import annotations

from collections.abc import Collection

from emergency_ckpt.errors import LocalTierError, RamdiskFull, SlotBusy
from emergency_ckpt.tiers.local.tier import LocalTier, SlotWriter
from emergency_ckpt.transfer.source import FileTarget, PartlyMade, Target
from emergency_ckpt.types import SaveId


def begin_restore_write(
    tier: LocalTier,
    save: SaveId,
    size_bytes: int,
    *,
    expendable: Collection[SaveId],
    sources: Collection[SaveId] = (),
    sparse: bool = False,
) -> SlotWriter:
    """The writer of a slot for ``save``. Room for two slots is enough.

    Room that is free goes first, then the slots of ``expendable``, then those of other saves but
    ``sources``, the oldest first: an older step is second choice. RamdiskFull or SlotBusy when
    there is none.

    Args:
      expendable: saves of which nothing here is needed: passed over by the plan, or about to be
        read anew.
      sources: what is written is copied from these.
      sparse: as in ``LocalTier.begin_write``.
    """
    held = {each.save for each in tier.held()[0]}
    failure: LocalTierError | None = None
    for protected in (held, held.difference(expendable), held.intersection(sources)):
        tier.protect(protected)
        try:
            return tier.begin_write(save, size_bytes, allow_extra=True, sparse=sparse)
        except (RamdiskFull, SlotBusy) as error:
            failure = error
    assert failure is not None
    raise failure


def receive_target(writer: SlotWriter, file: tuple[int, int] | None) -> Target:
    """Return what receives the slot's bytes. ``file``: from ``writer.sparse_file``, still open."""
    if file is None:
        return writer.mapping
    made = writer.made
    return FileTarget(*file) if made is None else PartlyMade(made, FileTarget(*file))
