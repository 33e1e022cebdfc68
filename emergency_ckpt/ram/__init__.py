"""The local tier: slots, manifests and host states of one process on its host's ramdisk.

1. ``tier.LocalTier`` claims a directory of the run, and scans it: ``ownership`` checks on the
   descriptor that it is this user's and closed, ``locks`` takes it with ``flock`` and
   records the process that holds it. A damaged file is quarantined with its reason, never used.
   ``process_files`` is how all read such a directory: this scan, ``eckpt serve``
   and the survey of ``eckpt ls``; ``held_saves`` gives the memory to readers, and ``step_reader``
   puts a step together from several.
2. ``reserve`` makes the slots (preallocated files of one step each) or finds them: two, and one
   more where this process writes to storage and there is room (``slot_choice.slots_for``).
3. ``begin_write`` chooses a slot without a step that must be kept (``slot_choice``), removes its
   manifest, and returns a ``SlotWriter``.
4. The writer copies the shards with their CRC32C, stages the manifest, and renames it into place:
   from then on the step counts on this process.
5. ``note_complete`` records that the step is complete on all processes; its predecessor's slot is
   then free.
6. ``leftovers`` removes the oldest unused run when room is needed: only files that this package
   names.

Guaranteed: a crash at any instant leaves the previous step complete; a published slot is not
changed; one writer per directory, whose lock ends with its process; no directory is deleted while a
process owns or serves it; a slot that is read is not written.

Storage writes from a pinned slot (``SlotWriter.pin``), and may take hours: ``may_stay_pinned`` says
whether local saves have slots enough meanwhile.

Not guaranteed: survival of the host, whose copies other slices hold; the bytes of a slot, which a
restore compares with the CRC32C of capture time; protection from root or from another process of
the same user.
"""

from typing import TYPE_CHECKING

from emergency_ckpt.faces import face_of

if TYPE_CHECKING:
    from emergency_ckpt.ram.leftovers import OtherRuns, left_runs, remove_run
    from emergency_ckpt.ram.manifest import build_contents, contents_digest
    from emergency_ckpt.ram.tier import LocalTier

__all__ = [
    "LocalTier",
    "OtherRuns",
    "build_contents",
    "contents_digest",
    "left_runs",
    "remove_run",
]

__getattr__ = face_of(
    __name__,
    {
        "LocalTier": "tier",
        "OtherRuns": "leftovers",
        "left_runs": "leftovers",
        "remove_run": "leftovers",
        "build_contents": "manifest",
        "contents_digest": "manifest",
    },
)
