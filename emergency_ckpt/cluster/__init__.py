"""The processes of a job: coordination service, membership, notices, and the way to peers.

``coordination`` is the only user of JAX's coordination service: put, get, list, count.
``collectives`` and ``rounds`` build gather, share and agree on it. ``membership`` is one process's
place in a life of the job; ``departures`` says which processes have left, and why.

Guaranteed: every wait has a deadline and names the missing processes; an error on one process of a
collective call becomes an error on all; keys of a save or restore are deleted once every process is
known to have passed it.
Not guaranteed: secrecy or authenticity of the service itself (see docs/security.md).

``preemption``: a notice is agreed by JAX or, where its service is off, by our own handler and keys
(``AgreedNotices``; the event ``preemption.source`` says which). JAX's manager numbers calls and
says yes at one number only, so the numbers are not steps: steps jump at a restore, and a notice
that came meanwhile would wait for ever. All processes agree on the count of calls at each start and
restore.

``timelines`` says when a restore is binding; ``storage.timeline`` what storage does then.
"""
