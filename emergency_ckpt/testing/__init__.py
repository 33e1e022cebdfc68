"""Parts for tests of a trainer, and of this package: no production code imports them.

1. ``gcs.FakeGcs``: a Google Cloud Storage server in memory, with faults and a log of requests.
2. ``memory_coordination``: the coordination service of a job, for threads of one process.
3. ``memory_holdings``: a peer without a ramdisk.
4. ``simulated_job``: the start of JAX as one process of several slices on one machine.

Guaranteed: servers listen on 127.0.0.1 only. The GCS server is tested with the real clients, and
both coordination services pass one conformance suite.

Not guaranteed: durability, access control, or GCS features that ``gcs`` lists as unsupported.
"""
