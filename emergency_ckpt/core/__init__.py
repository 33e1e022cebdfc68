"""Decisions as pure functions: no IO, no clock, no threads, no JAX.

1. ``placement`` gives each process the shards that it stores, and its buddies.
2. ``save`` decides at which step all processes save, in what order shards leave the devices, and
   which persistent steps are removed.
3. ``restore`` chooses the step of a restore and the source of every shard and host state.
4. ``timeline`` decides which saves belong to the job's history and which were rolled back.
5. ``stall`` decides whether long work goes on.

Guaranteed: the same arguments give the same result, on every process and for any order of
unordered input; a decision is returned with its reason; bytes from outside are bounded
(``limits``) and raise typed errors.

Not guaranteed: anything about effects. Callers hold the locks, read the clocks and send the bytes.
"""
