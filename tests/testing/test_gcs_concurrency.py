"""Several writers at once, and Orbax: what depends on preconditions being checked atomically."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

BUCKET = "bucket"


def test_compare_and_store_loses_no_update(start_client, name):
    total = start_client("tensorstore").count_together(
        bucket=BUCKET, name=name, writers=4, rounds=15
    )
    assert total == 60


def test_ocdbt_writers_in_several_processes_lose_no_key(start_client, name):
    processes = [start_client("tensorstore"), start_client("tensorstore second")]
    work = {0: [0, 1, 2], 1: [3, 4, 5]}
    with ThreadPoolExecutor(len(processes)) as pool:
        written = [
            pool.submit(
                processes[index].write_ocdbt, bucket=BUCKET, path=name, writers=writers, keys=5
            )
            for index, writers in work.items()
        ]
        for result in written:
            result.result()
    assert processes[0].read_ocdbt(bucket=BUCKET, path=name) == {
        f"writer{writer}/key{key}": b"%d" % (writer * 1000 + key)
        for writer in range(6)
        for key in range(5)
    }


def test_zarr_in_ocdbt_by_several_writers(start_client, name):
    assert start_client("tensorstore").zarr_together(bucket=BUCKET, path=name, writers=4)


@pytest.mark.parametrize(("is_marked", "newest"), [(True, 6), (False, 5)])
def test_orbax_restores_newest_step_with_its_marker(start_client, gcs, name, is_marked, newest):
    orbax = start_client("orbax")
    directory = f"gs://{BUCKET}/{name}"
    assert orbax.save_steps(directory=directory, steps=[5, 6]) == [5, 6]
    if not is_marked:
        gcs.delete_object(BUCKET, f"{name}/6/commit_success.txt")
    assert orbax.restore_newest(directory=directory) == [newest, True]


def test_epath(start_client, name):
    assert start_client("orbax").epath_work(directory=f"gs://{BUCKET}/{name}") == {
        "exists": [True, True, False],
        "children": ["empty", "sub"],
        "text": "{}",
        "size": 0,
    }
