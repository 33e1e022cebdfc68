"""Kills in persistent saves: the roles of the victims, the points, and what must come back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crashes import Kill, crash
from fake_gcs import FakeGcs
from running_jobs import job_root, run_life, spec_of

OLD, NEW = 10, 15

# Two slices of one host: process 0 writes, process 1 gives it its host state.
# One slice of two hosts: both write.
SHAPES = {"writer": (2, 1), "giver": (2, 1), "first_writer": (1, 2), "second_writer": (1, 2)}
VICTIMS = {"writer": 0, "giver": 1, "first_writer": 0, "second_writer": 1}

# The step that must come back, all RAM lost.
EVENTS = {
    ("writer", "persistent.stage.started"): OLD,
    ("writer", "persistent.stage.host_states_written"): OLD,
    ("writer", "persistent.stage.tensors_written"): OLD,
    ("writer", "persistent.stage.published"): NEW,
    ("writer", "persistent.complete"): NEW,
    ("giver", "persistent.stage.started"): OLD,
    # The writer ends the save alone.
    ("giver", "persistent.complete"): NEW,
    ("first_writer", "persistent.stage.started"): OLD,
    ("first_writer", "persistent.stage.host_states_written"): OLD,
    ("first_writer", "persistent.stage.tensors_written"): OLD,
    ("first_writer", "persistent.stage.published"): NEW,
    ("first_writer", "persistent.complete"): NEW,
    ("second_writer", "persistent.stage.started"): OLD,
    ("second_writer", "persistent.stage.host_states_written"): OLD,
    # All have written: whether the first writer ends the save alone depends on when it is killed.
    ("second_writer", "persistent.stage.tensors_written"): None,
    ("second_writer", "persistent.complete"): NEW,
}
_NAMES_PER_LIFE = 10


def kill_of(role: str, point: str, *, bucket: bool = False) -> Kill:
    slices, hosts = SHAPES[role]
    place = "bucket" if bucket else "directory"
    return Kill(
        name=re.sub("[^a-z0-9_.]+", "-", f"{role}-{place}-{point}"),
        program="crash_in_persistent_save",
        point=point,
        victim=VICTIMS[role],
        finishes=(role, point) == ("giver", "persistent.complete"),
        slices=slices,
        hosts=hosts,
        bucket=bucket,
    )


@contextlib.contextmanager
def place_for_jobs() -> Iterator[tuple[Path, FakeGcs]]:
    """A root for jobs, and a bucket that they find by their environment."""
    with (
        pytest.MonkeyPatch.context() as patch,
        FakeGcs(buckets=["bucket"]) as gcs,
        job_root() as root,
    ):
        for name, value in gcs.environment().items():
            patch.setenv(name, value)
        yield root, gcs


def is_complete(root: Path, gcs: FakeGcs, kill: Kill) -> bool:
    """Whether step 15 has our marker and Orbax's."""
    names = ["host_state/15/marker.json", "15/commit_success.txt" if kill.bucket else "15"]
    if kill.bucket:
        found = gcs.object_names("bucket", f"{kill.name}/persistent/")
        return all(f"{kill.name}/persistent/{name}" in found for name in names)
    return all((root / kill.name / "persistent" / name).exists() for name in names)


def attempt(root: Path, kill: Kill) -> AssertionError | None:
    try:
        crash(root, kill)
    except AssertionError as error:
        return error
    return None


def crash_all(root: Path, kills: Sequence[Kill]) -> dict[str, AssertionError]:
    """What went wrong with a crash, by case."""
    with ThreadPoolExecutor(2) as pool:
        errors = zip(kills, pool.map(lambda k: attempt(root, k), kills), strict=True)
        return {kill.name: error for kill, error in errors if error is not None}


def recover_all(root: Path, kills: Sequence[Kill], *, first_life: int = 0) -> dict[str, list[Any]]:
    """What the processes of the next life make of each case."""
    found: dict[str, list[Any]] = {}
    life = first_life
    for slices, hosts in sorted({(kill.slices, kill.hosts) for kill in kills}):
        names = [kill.name for kill in kills if (kill.slices, kill.hosts) == (slices, hosts)]
        for start in range(0, len(names), _NAMES_PER_LIFE):
            batch = names[start : start + _NAMES_PER_LIFE]
            spec = spec_of(
                root, "kill_job.py", "recover_persistent", *batch, slices=slices, hosts=hosts
            )
            results = run_life(spec, root, life=life)
            life += 1
            found.update({name: [result[name] for result in results] for name in batch})
    return found


def check(outcome: list[Any], kill: Kill, step: int) -> None:
    """All restored ``step`` and could save on, and nothing is left of what does not count."""
    assert all("value" in each for each in outcome), outcome
    right = {"tier": "persistent", "differences": [], "iterator_right": True}
    if kill.point.startswith("persistent."):
        saved = [5, *range(10, step + 15, 5)]
    else:
        saved = sorted({5, 10, step, NEW + 5, NEW + 10})
    for each in outcome:
        assert each["value"] == {
            "step": step,
            **right,
            "saved": saved,
            "leftovers": [],
            "again": {"step": saved[-1], **right},
        }
