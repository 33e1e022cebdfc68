"""Hangs: a job that makes no step any more ends by itself, with status 124, for its engine.

1. ``step_progress`` holds the last step of this process and the call of ours that it is in.
2. ``hang_watch`` publishes it in the background and reads that of the others when this process
   stands still; ``core.hang`` decides. The first decision is every process's.
3. ``exit`` dumps all stacks and ends the process; the one that hosts the coordination service last.

A process that is stopped, or whose native code holds the interpreter's lock, cannot end itself: the
others name it and end, and the engine kills it.
"""
