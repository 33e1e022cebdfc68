"""Many runs claim one directory of a bucket; ``test_two_jobs_in_one_directory.py`` judges."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from persistent_steps import life, writer_of

from emergency_ckpt.core.step_log import Table
from emergency_ckpt.errors import DirectoryInUse
from emergency_ckpt.storage import PersistentTier

RUN = "gs://bucket/run"


def is_told(run_id: str, incarnation: str) -> bool:
    try:
        writer_of(PersistentTier(RUN), run_id).hold(incarnation)
    except DirectoryInUse as error:
        return "saves there" in str(error)
    return False


def on_record() -> Table:
    table = PersistentTier(RUN).found.log.read().table
    assert table is not None
    return table


def main() -> None:
    runs = [f"run-{number}" for number in range(8)]
    with ThreadPoolExecutor(len(runs)) as pool:
        told = dict(zip(runs, pool.map(is_told, runs, [life(1)] * len(runs)), strict=True))
    holder = on_record().run_id
    assert not is_told(holder, life(2))
    restarted = on_record().incarnation
    older_told = is_told(holder, life(1))
    twin_told = is_told(holder, life(2, "b"))
    seen = {"told": told, "holder": holder, "restarted": restarted}
    print(json.dumps({**seen, "older_told": older_told, "twin_told": twin_told}))


main()
