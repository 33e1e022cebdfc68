"""Tries a bucket, well and with faults; prints what each try says and leaves there, as JSON."""

from __future__ import annotations

import json
import os
import time

import fsspec
from fake_gcs import FaultRule, GcsControl

from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage import StorageDirectory, probe_storage
from emergency_ckpt.storage.steps import StoredSteps

OWN = "000000000009-00000000000000aa"
OLD, YOUNG = "probe-000000000000-00000000000000bb", "probe-000000000009-00000000000000cc"
FAULTS = {
    "good": [],
    "left": [],
    "refused": [FaultRule(kind="status", status_code=403, method="POST")],
    "undeletable": [FaultRule(kind="status", status_code=403, method="DELETE")],
    "left_undeletable": [FaultRule(kind="status", status_code=403, method="DELETE")],
    "lost_reply": [FaultRule(kind="lose_reply", method="POST", count=1)],
    "precondition": [FaultRule(kind="status", status_code=412, method="POST", count=1)],
    "silent": [FaultRule(kind="delay", delay_s=600, method="POST")],
    "taken": [],
    "no_bucket": [],
}


def attempt(name: str) -> dict[str, object]:
    bucket = "absent" if name == "no_bucket" else "bucket"
    root = f"{bucket}/{name}"
    files = fsspec.filesystem("gs", finalize_on_close=True)
    if name == "left":
        for probe in (OLD, YOUNG):
            files.pipe_file(f"{root}/host_state/{probe}", b"left")
    if name == "taken":
        files.pipe_file(f"{root}/host_state/probe-{OWN}", b"of somebody else")
    if name == "left_undeletable":
        files.pipe_file(f"{root}/host_state/{OLD}", b"left")
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    for rule in FAULTS[name]:
        control.add_fault(rule)
    limit_s = 2.0 if name == "silent" else 60.0
    storage, error = StorageDirectory(f"gs://{root}", limit_s), ""
    try:
        probe_storage(storage, OWN, time.monotonic() + limit_s)
    except CheckpointError as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        control.clear_faults()
    steps = (
        []
        if name in ("no_bucket", "silent")
        else [each.step for each in StoredSteps(storage).view().steps]
    )
    files.invalidate_cache()
    left = [] if name == "no_bucket" else files.find(root)
    return {"error": error, "steps": steps, "left": sorted(x.rpartition("/")[2] for x in left)}


def replace_file() -> str:
    """Replace a file whose first upload the bucket refuses by a precondition that nobody set."""
    storage = StorageDirectory("gs://bucket/replaced", 60.0)
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    storage.put("hint", b"former")
    control.add_fault(FaultRule(kind="status", status_code=412, method="POST", count=1))
    try:
        storage.put("hint", b"newest")
    finally:
        control.clear_faults()
    return (storage.bytes_of("hint") or b"").decode()


if __name__ == "__main__":
    print(json.dumps({name: attempt(name) for name in FAULTS} | {"replaced": replace_file()}))
