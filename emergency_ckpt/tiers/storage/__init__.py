"""Access to a file system or an object store, with a deadline for every call.

1. ``directory`` is a directory there: its methods read, write and remove files.
2. ``calls`` runs each call in a thread, retries errors that may pass, and raises StorageTimeout at
   the deadline. The thread of a timed-out call continues; ``calls.LATE_CHANGES`` keeps it by the
   step that it may change.

Guaranteed: a caller waits until its deadline at most; a timed-out call does not delay the exit of
the process (``calls`` excludes blocked workers of thread pools from the interpreter's join); no
step is changed while an earlier timed-out call of this process may still change it.

Not guaranteed: that a timed-out call has no effect. No thread may be left inside C++ (a barrier,
TensorStore), because it takes the interpreter's lock at exit and aborts the process."""
