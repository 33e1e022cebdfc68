"""Three lives of a job of four, two and three processes; iterators go on by the docs' recipes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from running_jobs import job_root, of, run_life, spec_of

pytestmark = pytest.mark.timeout(900)

SIZE = 96
# Slices and hosts of each life, and what it reads.
LIVES = ((2, 2, "some"), (1, 2, "some"), (1, 3, "rest"))
Life = tuple[str, list[dict[str, Any]]]
Lives = dict[str, list[Life]]


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    found: Lives = {"elastic": [], "sliced": []}
    with job_root() as root:
        for life, (slices, hosts, reads) in enumerate(LIVES):
            programs = {kind: f"{kind}_{reads}" for kind in found}
            spec = spec_of(root, "remaps_job.py", *programs.values(), slices=slices, hosts=hosts)
            results = run_life(spec, root, life=life)
            for kind, program in programs.items():
                found[kind].append((program, results))
        yield found


@pytest.mark.parametrize("kind", ["elastic", "sliced"])
def test_each_life_goes_on_from_the_one_before(lives: Lives, kind: str) -> None:
    for life, (found, value) in enumerate([(None, 0.0), (10, 10.0), (11, 11.0)]):
        seen = seen_in(lives[kind][life])
        assert [(s["found"], s["value"]) for s in seen] == [(found, value)] * len(seen)
        assert [s["epoch"] for s in seen] == [int(value)] * len(seen)
    assert [s["tier"] for life in lives[kind][1:] for s in seen_in(life)] == ["local"] * 5


def seen_in(life: Life) -> list[dict[str, Any]]:
    program, results = life
    return of(results, program)


def _times(lives: list[Life]) -> Counter[int]:
    return Counter(number for life in lives for seen in seen_in(life) for number in seen["read"])


def test_elastic_recipe_reads_each_element_once(lives: Lives) -> None:
    assert _times(lives["elastic"]) == Counter(range(SIZE))
    assert all(seen["read"] for life in lives["elastic"] for seen in seen_in(life))


def test_sliced_recipe_leaves_out_no_element(lives: Lives) -> None:
    """What some were ahead of the one least far comes again, and fewer than there are besides."""
    times = _times(lives["sliced"])
    assert set(times) == set(range(SIZE))
    ahead = sum(len(seen["read"]) for life in lives["sliced"] for seen in seen_in(life)) - SIZE
    assert 0 < ahead <= 2 + 1 + 1 + 2
