"""Several writers at once, and Orbax: what depends on preconditions being checked atomically."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fake_gcs import bytes_received

BUCKET = "bucket"


def test_compare_and_store_loses_no_update(start_client, name):
    total = start_client("tensorstore").count_together(
        bucket=BUCKET, name=name, writers=4, rounds=15
    )
    assert total == 60


def test_ocdbt_writers_in_several_processes_lose_no_key(start_client, name):
    processes = [start_client("tensorstore"), start_client("tensorstore", shared=False)]
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


def test_orbax_saves_keeps_and_restores(start_client, gcs, name):
    orbax = start_client("orbax")
    directory = f"gs://{BUCKET}/{name}"
    assert orbax.save_steps(directory=directory, steps=[1, 2, 3], keep=2) == [2, 3]
    assert orbax.restore_newest(directory=directory) == [3, True]
    names = gcs.object_names(BUCKET, f"{name}/")
    assert {item.split("/")[1] for item in names} == {"2", "3"}
    assert f"{name}/3/commit_success.txt" in names
    assert bytes_received(gcs.requests(), target=f"{BUCKET}/{name}/3/*") > 10_000


def test_orbax_does_not_see_a_step_without_its_marker(start_client, gcs, name):
    orbax = start_client("orbax")
    directory = f"gs://{BUCKET}/{name}"
    orbax.save_steps(directory=directory, steps=[5, 6], keep=2)
    gcs.delete_object(BUCKET, f"{name}/6/commit_success.txt")
    assert orbax.restore_newest(directory=directory) == [5, True]


def test_epath(start_client, name):
    assert start_client("orbax").epath_work(directory=f"gs://{BUCKET}/{name}") == {
        "exists": [True, True, False],
        "children": ["empty", "sub"],
        "text": "{}",
        "size": 0,
        "end": False,
    }
