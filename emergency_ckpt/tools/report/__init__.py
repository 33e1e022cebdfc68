"""The report of a run: a page, a trace and lines of text, from the events of its processes.

1. ``reading`` reads the files of an event log; damaged lines are counted and named.
2. ``lives`` groups the events into lives of the job, from one start or restore to the next.
3. ``figures`` computes from these what was lost, how long each recovery took (steps, RPO, RTO), and
   how the run's time was used; ``spans`` the bars and marks of each process. Both are pure.
4. ``summary`` has the figures in words, ``trace`` the bars and marks for Perfetto, ``page`` both.

Guaranteed: the page has no script, needs no network, and its policy forbids any; what a log says is
text in it, never markup; the same events give the same figures, in any order of files. Not
guaranteed: that the clocks of hosts agree; a time between two hosts is as good as their clocks.
"""
