"""The write of a step into a bucket with few requests: its objects, its database, its commit.

A bucket has no folders to make and nothing to rename. Orbax's checkpointer nevertheless looks for
folders, lists, and reads what it has just written: some fifty requests, one after the other. Its
finished step is a set of objects of which ``commit_success.txt`` is the last. ``step_writer`` makes
the same set, and plain Orbax reads it.

Guaranteed: no object of another writer is replaced. A step whose place was cleared or claimed by
another is not committed, and this writer fails.

Not guaranteed: the second when the place is cleared while ``commit_success.txt`` is written, and
this process ends before it has looked again and removed it.
"""
