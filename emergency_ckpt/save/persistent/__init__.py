"""Saves into the persistent tier, and the removal of steps that no policy keeps.

One save:

1. The writers are the processes of the primary slice.
2. Every other process sends its host state to its ``host_state_writer`` in the primary slice, or
   the reason why it cannot.
3. Each writer has its shards in host memory (``capture``). They are in the slot of the step's local
   save, which the writer pins, or are copied at once into an area that the next save reuses.
4. The writers write host states, then tensors (the first commits), then checksums, then
   ``marker.json``. Each stage is a round (``cluster.round``) that the first writer leads: the first
   writer alone reads the reports, and answers all with the first failure or none. A writer asks the
   coordination service eight times a save, whatever the number of writers.
5. The first writer sets one value, the outcome. Every process waits for this value in the
   background and emits ``persistent.complete`` where the save is known to be complete.

The last save of a run that ends well (``save.ending``) has two differences. Each writer pins the
slot that has had the step for a while. And where the writers of step 1 keep nothing in RAM, the
first of them leads and another slice writes the tensors.

Guaranteed: a step with a marker is complete; a written step is an ordinary Orbax step.
Not guaranteed: that a step without a marker is absent. A step that has no host-state directory at
all was written by plain Orbax and counts as tensors only.

The marker has the CRC32C of that capture. Storage may hang for hours, so a slot stays pinned only
while the local tier has as many other slots as it needs (``LocalTier.may_stay_pinned``). A write
that was given up keeps its memory, at most one slot and the area, until no view of that memory is
alive. Until then a save that needs more memory fails.

Each writer writes its part of Orbax's files (``storage.step_writer``), in one layout for any number
of slices. The writers meet in one more round (``WriterMeetings``), within the save's deadline: the
first writer announces that it has made the folders, and waits for the reports that all is written
before it commits. A save that is given up raises before it commits. A commit that was under way is
then withdrawn, unless host states lie beside it: in that case the next save removes both.

From the second failed save in a row on, the first writer pauses (``core.save.timing``; not for
forced saves), and tells the others at a due step. ``retention`` removes old steps in the background
on the process that published the newest step, but never the last complete step, nor any step while
a restore reads.
"""
