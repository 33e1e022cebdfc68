"""The directories of a ramdisk: their owners, their locks, and the removal of old ones.

1. ``ownership`` opens a directory and checks on the descriptor that it is this user's and closed.
2. ``locks`` claims it with ``flock``; ``owners`` records the process that holds it.
3. ``other_runs`` removes the oldest unused run when room is needed; ``deletion`` removes only files
   that this package names.

Guaranteed: one writer per directory, whose lock ends with its process; no directory is deleted
while a process owns or serves it.

Not guaranteed: protection from root or from another process of the same user.
"""
