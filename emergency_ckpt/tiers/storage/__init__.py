"""Access to a file system or an object store, with a deadline for every call.

A call that is given up goes on in its thread. ``calls`` takes workers of thread pools that are
blocked in one out of what the interpreter's end waits for. ``abandoned_calls`` knows which steps
such a call may still change: nothing else of this process changes those before it has ended. No
thread may be left inside C++ (a barrier, TensorStore): it takes the interpreter's lock at the end,
and aborts."""
