"""The processes of a job: coordination service, membership, notices, and access to peers.

1. ``membership`` compares the settings of all processes, and gives the run's secret to all.
2. It claims the ramdisk, starts the server and agrees on an incarnation (``peers``).
3. ``coordination`` is the only user of JAX's coordination service: put, get, list.
   ``round`` has the two ways to agree through the service, a round and a cell that is set once, and
   the one clean-up of their keys (``Series``); a round ends each start and each restore.
4. ``left_processes`` records the processes that have left, and decides which processes are absent;
   ``peers`` finds a process that died without a report, for a wait inside ``save``.
   ``preemption`` agrees on the step at which all act on a notice.
5. ``shard_source`` has what a process serves to its peers: its RAM, and in a restore the part of a
   step that it has read from storage (``LoadedPart``).
6. ``timelines`` decides when a restore is binding, and applies the restore to the persistent
   directory, on which the run has its claim.
7. ``beats`` reports, in a restore or a save to storage, that a process makes progress; the others
   wait for the process as long as it does.

The vote (doubt), the announcements of steps, and the sync point of a notice add rules of their own
to rounds and cells.

Guaranteed: every wait has a deadline and names the missing processes; an error on one process of a
collective call becomes an error on all; keys of a save or restore are deleted once every process is
known to have passed it.

Not guaranteed: secrecy or availability of the service itself (see docs/security.md).
"""

from typing import TYPE_CHECKING

from emergency_ckpt.faces import face_of

if TYPE_CHECKING:
    from emergency_ckpt.cluster.coordination import Coordinator, LocalCoordinator
    from emergency_ckpt.cluster.left_processes import LeftProcesses
    from emergency_ckpt.cluster.peers import Peers
    from emergency_ckpt.cluster.round import Cell, Round, Rule, Series
    from emergency_ckpt.cluster.shard_source import ProcessHoldings

__all__ = [
    "Cell",
    "Coordinator",
    "LeftProcesses",
    "LocalCoordinator",
    "Peers",
    "ProcessHoldings",
    "Round",
    "Rule",
    "Series",
]

__getattr__ = face_of(
    __name__,
    {
        "Coordinator": "coordination",
        "LocalCoordinator": "coordination",
        "LeftProcesses": "left_processes",
        "Round": "round",
        "Rule": "round",
        "Cell": "round",
        "Series": "round",
        "Peers": "peers",
        "ProcessHoldings": "shard_source",
    },
)
