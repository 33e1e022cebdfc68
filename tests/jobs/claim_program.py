"""Many runs claim one directory of a bucket; ``test_two_jobs_in_one_directory.py`` judges."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from emergency_ckpt.cluster.storage.claim import DirectoryClaim
from emergency_ckpt.core.run_claim import RunRecord
from emergency_ckpt.errors import DirectoryInUse
from emergency_ckpt.tiers.persistent.run_record import RunFile
from emergency_ckpt.tiers.persistent.tier import PersistentTier

RUN = "gs://bucket/run"


def is_told(run_id: str, life: str) -> bool:
    try:
        DirectoryClaim(PersistentTier(RUN), RunRecord(run_id, False, life)).hold()
    except DirectoryInUse as error:
        return "saves there" in str(error)
    return False


def main() -> None:
    runs = [f"run-{number}" for number in range(8)]
    with ThreadPoolExecutor(len(runs)) as pool:
        told = dict(zip(runs, pool.map(is_told, runs, ["0001-a"] * len(runs)), strict=True))
    file = RunFile(PersistentTier(RUN).storage)
    there = file.read().record
    assert there is not None
    assert not is_told(there.run_id, "0002-b")
    restarted = file.read().record
    assert restarted is not None
    older_told = is_told(there.run_id, "0001-a")
    seen = {"told": told, "holder": there.run_id, "restarted": restarted.life}
    print(json.dumps({**seen, "older_told": older_told}))


main()
