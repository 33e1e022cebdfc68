"""Costs of placements against what the planner and real placements do, and the recommendation."""

from __future__ import annotations

import dataclasses

import pytest

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.placement_study import JobShape, PlacementCosts, recommend, study

JOB = JobShape(
    slices=8,
    hosts_per_slice=64,
    state_bytes=64 << 30,
    ramdisk_bytes=None,
)


def costs(name: str, job: JobShape = JOB) -> PlacementCosts:
    return next(row for row in study(job) if row.name == name)


def test_host_stores_and_transfers_copies_of_so_many_slices() -> None:
    row = costs("striped(2)")
    assert row.stored_bytes == (1 << 30) / 4
    assert row.ram_bytes == (1 << 30) / 2
    assert row.fetch_bytes == 0.75 * (1 << 30)
    assert costs("all_but_primary").fetch_bytes == costs("striped(8)").ram_bytes / 2


def test_every_number_of_copies_and_the_default_are_studied() -> None:
    names = [row.name for row in study(JOB)]
    assert names == [f"striped({r})" for r in range(1, 9)] + ["all_but_primary"]


@pytest.mark.parametrize(
    ("wanted", "name"), [(0.5, "striped(2)"), (0.985, "striped(2)"), (0.999, "striped(3)")]
)
def test_fewest_bytes_that_are_safe_enough(wanted: float, name: str) -> None:
    chosen, reason = recommend(JOB, study(JOB), wanted_survival=wanted)
    assert chosen.name == name
    assert "4 random hosts" in reason


def test_one_copy_is_never_recommended_where_there_are_slices() -> None:
    chosen, _ = recommend(JOB, study(JOB), wanted_survival=0.0)
    assert chosen.name == "striped(2)"


def test_small_ramdisk_gets_safest_that_fits_or_honest_word() -> None:
    job = dataclasses.replace(JOB, ramdisk_bytes=512 << 20)
    chosen, reason = recommend(job, study(job), wanted_survival=0.999)
    assert chosen.name == "striped(2)"
    assert "less than the 99.9000% wanted" in reason
    job = dataclasses.replace(JOB, ramdisk_bytes=1)
    chosen, reason = recommend(job, study(job), wanted_survival=0.999)
    assert chosen.name == "striped(1)"
    assert "none fits" in reason


def test_job_of_one_slice_or_one_host_has_an_answer() -> None:
    job = dataclasses.replace(JOB, slices=1, hosts_per_slice=1)
    rows = study(job)
    assert [row.survival for row in rows] == [(0.0,)]
    assert recommend(job, rows, wanted_survival=0.9)[0].stored_bytes == 64 << 30


def test_impossible_job_is_refused_with_every_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(JOB, slices=0, hosts_per_slice=0, most_lost_hosts=0)
    words = ("slices must", "hosts per slice", "lost hosts")
    assert all(word in str(caught.value) for word in words)
