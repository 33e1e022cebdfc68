"""RAM brought to storage when a job is over for good (``eckpt drain``).

1. ``drain`` chooses the newest whole step and writes it, alone in its directory (``lock``).
2. ``peer_ram`` brings what only other hosts have.
3. ``last`` drains without a command: the servers of a job's hosts notice that the job is over, and
   agree on the server that drains. ``last`` starts ``drain`` as a process, without JAX or Orbax.

Guaranteed: a kill at any instant leaves storage as a killed save does. Not guaranteed: that a job
is over; one that runs on hosts that were not named is not noticed, and is not harmed.
"""
