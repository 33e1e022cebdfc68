"""The report of a run: one HTML file, made from the events of its processes.

1. ``reading`` reads the files of an event log; damaged lines are counted and named.
2. ``core/run_log`` computes figures, bars and tables from the events.
3. ``charts`` describes the figures to Plotly; ``page`` writes the file, with Plotly's script in it.

Guaranteed: the file needs no network and its policy forbids any; what a log says is text in it,
never markup or a script. Not guaranteed: that clocks of hosts agree.
"""
