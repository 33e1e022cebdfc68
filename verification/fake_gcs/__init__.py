"""A Google Cloud Storage server for tests: in memory, on 127.0.0.1, with faults on request.

TensorStore, gcsfs and Orbax work against it unchanged::

    with FakeGcs(buckets=["bucket"]) as gcs:
        subprocess.run([...], env={**os.environ, **gcs.environment()})
        gcs.add_fault(FaultRule(kind="status", status_code=503, target="bucket/x*", count=2))
        print(bytes_served(gcs.requests()))

No existing server suffices (as of November 2026): ``gcp-storage-emulator`` 2026.7.19 supports
neither preconditions nor generation parameters, so concurrent writers lose keys;
``fake-gcs-server`` is a Go program without faults, and its one wrapper on PyPI is a 33 MB binary of
unknown upkeep; Google's ``storage-testbench`` is not on PyPI. None logs requests with their bytes.

It has what saves and restores ask for, and refuses the rest: lists, reads, uploads in one request
and in chunks, deletions and rewrites, with preconditions on generations. Every credential is
accepted.

Reading order: resources, store, listing, uploads (state); routes, multipart, api (one request, one
reply); faults, request_log, admin; server (HTTP); serving, control (start and use). All but the
last three are pure.
"""

from fake_gcs.control import FakeGcsError, GcsControl
from fake_gcs.faults import FaultRule, FaultState
from fake_gcs.request_log import (
    RequestRecord,
    bytes_received,
    bytes_served,
    round_trips,
)
from fake_gcs.serving import FakeGcs

__all__ = [
    "FakeGcs",
    "FakeGcsError",
    "FaultRule",
    "FaultState",
    "GcsControl",
    "RequestRecord",
    "bytes_received",
    "bytes_served",
    "round_trips",
]
