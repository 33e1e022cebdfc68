"""Saves: when one is due, its snapshot, and its way into the local tier.

``saver`` lists the steps of a save, and is the file to read first. ``turn_wait`` has the wait for
the previous save, ``ending`` the end of all saves. After the snapshot, a save to the local tier
counts by these steps:

1. ``local_save`` removes the manifest of a free slot, copies the shards into the slot with their
   CRC32C in one pass, and writes and renames the new manifest. Then it publishes the host state,
   and sends the host state to the buddies.
2. ``vote``: each process puts a ballot (digest of its manifest, or the reason of its refusal). The
   leader sets the decision once, within a deadline, and every process acts on that value alone.
3. After "complete" the older slot may be written again. Otherwise that slot stays protected.

Guaranteed: at any instant one published slot holds a complete step; no process overwrites step s
while another process still counts on step s; a step without a save costs no communication.
Not guaranteed: that a save succeeds. A failed save is logged, counted, raised by
``check_for_errors``, and never ends training.

The decision is a value, and not a barrier, because a barrier can succeed at one process and time
out at another: the first would then overwrite s, the second s+k, and after a crash neither is
complete. A process that cannot read the decision is in doubt: it protects both saves, skips, and
asks again at the next save. Where the leader has left before it decided, the save stays in doubt.
The decision of the newest complete save is never deleted. There are no barriers, since the
coordination service keeps the name of each, some 900 bytes, as long as the service runs.

Where a save takes longer than the next one may wait, the leader leaves the next save out for all
processes (``turns``), and names it in the decision on the save under way.

A process that leaves (``stop``, an exception, the program's end) reports that to the others at
once, with the newest save that it has begun in each tier. A vote or a stage that waits looks for
this report, and for a report that the process has begun a later save. A wait in the training
thread also checks whether the port of a process is closed (``cluster.peers.LostPeers``).

When to save: the training thread decides what follows from the step alone, alike on all processes.
The leader decides what depends on a clock or on a save under way, and announces the step ahead
(``announcements``). A process that reads an announcement too late votes against the save.
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
