"""Decisions of a save: when, together on all processes; in what order; which steps stay. Pure.

1. ``save_rules`` decides from the step alone, ``timing`` from the leader's clock; it pauses a tier
   whose saves fail, too.
2. ``announcements`` chooses a step ahead of all processes when the decision is the leader's.
3. ``snapshot_plan`` chooses the device, the order and the copies for each transfer to the host.
4. ``save_rules.decide_vote`` decides whether the save is complete on all processes.
5. ``save_rules`` also lists the persistent steps that may be removed.
6. ``ending`` says at the end of a run, and after a notice, whether storage gets RAM's newest step.

Guaranteed: an announced step is the same call of ``save`` on all processes, and a process that is
late for the call knows it, for any delay of messages; a save counts only when every expected
process published it and none refused; the newest complete persistent step, and one that is being
read, is never listed for removal.

Not guaranteed: that an announced save is also written; a process may be late, or fail to write its
part, and the vote then declares the save incomplete.
"""
