"""Writes steps into a bucket, each under faults; ``test_writes_to_a_bucket.py`` judges."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from fake_gcs import FaultRule, GcsControl
from state_samples import on_host

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.array_writes import DATA_FILE_BYTES
from emergency_ckpt.storage.directory_writer import delete_step
from emergency_ckpt.types import SaveId

RUN = "gs://bucket/run"
DATA, MANIFEST = "*/state/d/*", "*/state/manifest.ocdbt"
ROWS = 256
LARGE_FILES = 2
WAIT_S = 120.0

FAULTS: dict[str, tuple[FaultRule, ...]] = {
    f"{kind} of {what}": (
        FaultRule(kind=kind, operation="objects.insert", target=target, count=2, **fields),
    )
    for what, target in (("data", DATA), ("manifest", MANIFEST))
    for kind, fields in (("status", {"status_code": 503}), ("reset", {}))
} | {
    "precondition of data": (
        FaultRule(kind="status", status_code=412, operation="objects.insert", target=DATA, count=1),
    ),
    "precondition of manifest": (
        FaultRule(
            kind="status", status_code=412, operation="objects.insert", target=MANIFEST, count=1
        ),
    ),
}


def state_of(step: int, leaves: int = 3, rows: int = ROWS) -> dict[str, Any]:
    random = np.random.default_rng(step)
    bits = random.integers(0, 2**32, (leaves, rows, 1024), np.uint32)
    return {f"leaf{i}": jax.device_put(bits[i]) for i in range(leaves)}


def write(step: int, state: dict[str, Any]) -> None:
    tree, shards = on_host(state)
    save = SaveId(step=step, incarnation="life", run_id="run")
    tier = PersistentTier(RUN, timeout_s=60.0)
    tier.write_tensors(save, tree, shards, (0,))


def is_complete(step: int, state: dict[str, Any]) -> bool:
    """Return whether plain Orbax finds the step, with these values."""
    if step not in ocp.utils.checkpoint_steps(RUN):
        return False
    found = ocp.StandardCheckpointer().restore(f"{RUN}/{step}/state")
    return all(np.array_equal(found[name], value) for name, value in state.items())


def under_fault(gcs: GcsControl, step: int, rules: tuple[FaultRule, ...]) -> dict[str, Any]:
    """One write under faults, and one more after them where it failed."""
    state = state_of(step)
    for rule in rules:
        gcs.add_fault(rule)
    error = ""
    try:
        write(step, state)
    except CheckpointError as failure:
        error = str(failure)
    hits = sum(fault.hit for fault in gcs.fault_states())
    gcs.clear_faults()
    seen = {"error": error, "hits": hits, "whole": is_complete(step, state)}
    if error:
        storage = PersistentTier(RUN).storage
        storage.do(
            "remove", f"/{step}", lambda: delete_step(storage, storage.objects_with(f"{step}/"))
        )
        write(step, state)
        seen["whole then"] = is_complete(step, state)
    return seen


def requests_for(gcs: GcsControl, step: int, state: dict[str, Any]) -> dict[str, Any]:
    gcs.clear_requests()
    write(step, state)
    records = gcs.requests()
    data = [each for each in records if "/d/" in each.target and each.status == 200]
    return {
        "count": len(records),
        "operations": Counter(each.operation for each in records),
        "data": [each.bytes_in for each in data if each.operation == "objects.insert"],
    }


def written(gcs: GcsControl, folder: str) -> dict[str, Any]:
    """What a step consists of, without what differs from save to save."""
    prefix = f"{folder}/state/"
    names = [name.removeprefix(f"{folder}/") for name in gcs.object_names("bucket", f"{folder}/")]
    base = {"driver": "gcs", "bucket": "bucket", "path": prefix}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    values = {key.decode(): store.read(key).result().value for key in store.list().result()}
    metadata = json.loads(gcs.object_bytes("bucket", f"{folder}/_CHECKPOINT_METADATA"))
    return {
        # Orbax keeps the database of a single writer beside the one that it is merged into.
        "names": sorted(
            {name.rpartition("/d/")[0] or name for name in names if "process_0/" not in name}
        ),
        "database": {key: hash(value) for key, value in values.items()},
        "documents": [
            json.loads(gcs.object_bytes("bucket", prefix + name))
            for name in ("_METADATA", "_sharding", "array_metadatas/process_0")
        ],
        "metadata": {
            key: type(value).__name__ if key.endswith("nsecs") else value
            for key, value in metadata.items()
        },
    }


def beside_orbax(gcs: GcsControl) -> dict[str, Any]:
    state = state_of(0)
    write(0, state)
    with ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler(use_compression=False))
    ) as checkpointer:
        checkpointer.save(
            "gs://bucket/orbax/0",
            args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)),
            custom_metadata={"emergency_ckpt": {"run_id": "run", "incarnation": "life"}},
        )
    return {"ours": written(gcs, "run/0"), "orbax": written(gcs, "orbax/0")}


def whole_save(gcs: GcsControl) -> int:
    """Requests of a job's third save to storage: from then on all take the same."""
    state = state_of(0)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as ram,
        EmergencyCheckpointer(
            dir="gs://bucket/job",
            local_dir=ram,
            local_save_every=0,
            save_every=1,
            keep_last_n=None,
        ) as ckpt,
    ):
        ckpt.restore(state=state)
        for step in (1, 2, 3):
            gcs.clear_requests()
            ckpt.save(step=step, state=state)
            ckpt.wait_until_finished(WAIT_S)
            assert ckpt.failed_saves == 0
    return len(gcs.requests())


def main() -> None:
    gcs = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    large = state_of(2, leaves=2 * LARGE_FILES, rows=DATA_FILE_BYTES // 4096 // 2)
    print(
        json.dumps(
            {
                "beside": beside_orbax(gcs),
                "whole": whole_save(gcs),
                "small": requests_for(gcs, 1, state_of(1)),
                "many": requests_for(gcs, 3, state_of(3, leaves=500, rows=1)),
                "large": requests_for(gcs, 2, large),
                "faults": {
                    name: under_fault(gcs, 10 + number, rules)
                    for number, (name, rules) in enumerate(FAULTS.items())
                },
            }
        )
    )


if __name__ == "__main__":
    main()
