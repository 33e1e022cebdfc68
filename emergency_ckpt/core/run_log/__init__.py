"""The story of a run, computed from its events.

1. ``run_events`` reads numbers and text of an event, bounded: a log is written by others.
2. ``lives`` groups the events into lives of the job, from one start or restore to the next.
3. ``recoveries`` compares each life with the one before: steps lost, RPO, RTO.
4. ``goodput`` divides the run's time into training that counts, training done again, stalls,
   recoveries and the rest.
5. ``spans``, ``byte_sources`` and ``step_times`` are the rows of the report's figures.

Guaranteed: the same events give the same figures, in any order of files. Not guaranteed: that the
clocks of hosts agree; a time between two hosts is as good as their clocks.
"""
