"""A torchrun for one machine, for tests and demos (``eckpt launch``).

Clusters have their engines' templates. ``examples.faults`` injects faults.

1. ``supervisor`` starts one process per host (``process_set``), each with its ramdisk directory and
   its place in the job (``tools.job_environment``, which the templates of engines set as well).
2. It polls their ends, logs and steps (``extras.progress``).
3. When a process dies or the job hangs, it ends all others: they wait in a collective.
4. ``supervisor.decide`` decides: restart with new ports and the same ramdisks, or give up; after a
   configuration error at once.

Guaranteed: no process survives the supervisor, also after SIGKILL (``janitor``); one supervisor per
``local_root``; a failed job is a result with the end of the relevant log.

Not guaranteed: real hosts. A ramdisk is a directory.
"""
