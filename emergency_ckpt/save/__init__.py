"""Saves: when one is due, its snapshot, and its way into the local tier.

``saver`` says the steps of a save, and is the file to read first. ``turn_wait`` is the wait for the
save before, ``ending`` the end of all. What makes a save of the local tier count, after the
snapshot:

1. ``local_save`` removes the manifest of a free slot, copies the shards into it with their CRC32C
   in one pass, writes the new manifest beside it and renames it, publishes the host state, and
   pushes it to the buddies.
2. ``vote``: each process puts a ballot (digest of its manifest, or the reason of its refusal). The
   leader sets the decision once, within a deadline, and every process acts on that value alone.
3. After "complete" the older slot may be written again. Otherwise it stays protected.

Guaranteed: at any instant one published slot holds a complete step; no process overwrites step s
while another still counts on it; a step without a save costs no communication.
Not guaranteed: that a save succeeds. A failed one is logged, counted, raised by
``check_for_errors``, and never ends training.

The decision is a value, and not a barrier, because a barrier can succeed at one process and time
out at another: the first would then overwrite s, the second s+k, and after a crash neither is
complete. A process that cannot read the decision is in doubt: it protects both saves, skips, and
asks again at the next save. The leader decides on each save before it comes to the next one, so a
save that the leader has passed without a decision is incomplete. Where the leader has left, the
save stays in doubt. The decision of the newest complete save is never deleted. The coordination
service keeps the name of each barrier, some 900 bytes, until it ends,
and a ``get`` that runs into its deadline costs 15 kB until the key is set; so there are no
barriers, and waits look again (``cluster.round.wait_for_key``).

Where a save takes longer than the next one may wait, the leader leaves the next one out, for all
(``turns``): its decision on the save before says so.

A process that leaves (``stop``, an exception, the program's end) tells the others at once, with the
newest save that it has begun in each tier. A vote or a stage that waits looks for that, checks
whether the port of a silent process is closed, and whether that process is at a later save.

When to save: what follows from the step alone is decided in the training thread, alike everywhere.
What depends on a clock or on a save under way (continuous, adaptive, every so many seconds, a
user's policy) is decided by the leader, which announces the step far enough ahead
(``announcements``; the rules are ``core.save.announcements``). Each process then decides from the
step alone. A process that learns of it late says so (``save.skipped``, cause "late") and votes
against the save, which is incomplete then, and is announced once more.
"""

from typing import TYPE_CHECKING

from emergency_ckpt.faces import face_of

if TYPE_CHECKING:
    from emergency_ckpt.save.announcements import SaveAnnouncements
    from emergency_ckpt.save.vote import Ballot, Outcome, Vote

__all__ = ["Ballot", "Outcome", "SaveAnnouncements", "Vote"]

__getattr__ = face_of(
    __name__,
    {
        "Vote": "vote",
        "Ballot": "vote",
        "Outcome": "vote",
        "SaveAnnouncements": "announcements",
    },
)
