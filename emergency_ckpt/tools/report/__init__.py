"""The report of a run: a page, a trace and lines of text, from the events of its processes.

1. ``lives`` reads the files of an event log, where damaged lines are counted and named, and groups
   the events into lives of the job, from one start or restore to the next.
2. ``figures`` computes from these what was lost, how long each recovery took (steps, RPO, RTO), and
   how the run's time was used; ``spans`` the bars and marks of each process. Both are pure.
3. ``page`` shows the figures in words and the bars; a trace has the bars for Perfetto.

Guaranteed: the page has no script, needs no network, and its policy forbids any; what a log says is
text in it, never markup; the same events give the same figures, in any order of files. Not
guaranteed: that the clocks of hosts agree; a time between two hosts is as good as their clocks.
"""
