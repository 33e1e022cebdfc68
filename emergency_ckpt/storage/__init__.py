"""The persistent tier: one sharded copy of a step in Orbax's format, and our marker beside it.

A save, on the processes that ``core.placement.writers`` chooses:

1. ``directory_writer`` clears the step's place: remains and rolled-back steps of the same number
   are removed. Where a step of this number counts, the save fails.
2. Each process writes its host state.
3. ``step_writer`` has ``item`` write the tensors from host memory, and commits them as Orbax does.
4. ``tier.finish`` writes the CRC32Cs of capture time, then ``marker.json``; the step counts from
   the version of the log that lists the step (``directory_writer``).

A restore: ``steps`` lists the steps and checks their markers; ``orbax_reader`` reads boxes. Tools
read a step through ``StoredStepReader``, and write a step from another tier with ``tier.publish``.

Guaranteed: a crash at any instant leaves the step complete or not counting; a step that was rolled
back is hidden, and is removed when its number is saved anew; every call has a deadline.

Every access: ``directory`` reads, writes and removes files of a file system or an object store, and
``calls`` runs each call in a thread, retries temporary errors, and raises StorageTimeout at the
deadline. The thread of a timed-out call goes on, and may still change a step: no other call changes
this step before the thread has ended (``calls.LATE_CHANGES``). No thread may be left inside C++ (a
barrier, TensorStore), because the thread would take the interpreter's lock at exit and abort the
process.

On a file system all files of a step are synced to the disk before the version of the log that lists
the step: TensorStore syncs the tensors (``file_io_sync``), ``directory`` the host states, the
marker and the versions of the log, each with its folder.

Not guaranteed: the bytes of the tensors, which the restore compares with the CRC32Cs of capture
time; protection from a process that may write to the directory (docs/security.md).
"""

from typing import TYPE_CHECKING

from emergency_ckpt.faces import face_of

if TYPE_CHECKING:
    from emergency_ckpt.storage.directory import StorageDirectory, probe_storage
    from emergency_ckpt.storage.directory_writer import DirectoryWriter
    from emergency_ckpt.storage.log import LogRead, StepLog
    from emergency_ckpt.storage.marker import StepMarker
    from emergency_ckpt.storage.tier import PersistentTier

__all__ = [
    "DirectoryWriter",
    "LogRead",
    "PersistentTier",
    "StepLog",
    "StepMarker",
    "StorageDirectory",
    "probe_storage",
]

__getattr__ = face_of(
    __name__,
    {
        "PersistentTier": "tier",
        "StorageDirectory": "directory",
        "DirectoryWriter": "directory_writer",
        "StepLog": "log",
        "LogRead": "log",
        "StepMarker": "marker",
        "probe_storage": "directory",
    },
)
