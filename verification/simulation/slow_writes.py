"""Jobs whose writes to RAM take too long for the interval of saves: `slow_writes.py SEEDS [FIRST]`.

A save is due so often that its process waits for the one before as long as it may, and leaves saves
out. The processes write at different speeds, for one to two times as long as it takes from one due
save to the next. A good part of the saves must be complete all the same: processes may
not take turns at leaving out.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from loop import SAVE_TIMEOUT_S
from plan import Life, Plan
from schedules import run_seeds

STEPS = 24
MOST_APART_S = 9.0
"""A vote fails where a write ends later than the leader's by the timeout of a save."""


def draw(seed: int) -> Plan:
    """Return the plan of a seed: one life of a job in which nothing fails."""
    rng = random.Random(f"slow writes {seed}")
    count, step_s = rng.choice((2, 3, 4, 6)), rng.choice((1.0, 2.0, 5.0, 8.0))
    longest_s = 2 * (step_s + SAVE_TIMEOUT_S)
    least_s = rng.uniform(longest_s / 2, max(longest_s / 2, longest_s - MOST_APART_S))
    most_s = min(longest_s, least_s + MOST_APART_S)
    writes: list[tuple[int, float, float]] = []
    for process in range(count):
        seconds = rng.uniform(least_s, most_s)
        writes.append((process, seconds, min(most_s, seconds + rng.choice((0.0, 0.3, 1.0)))))
    life = Life(
        tuple((process,) for process in range(count)),
        tuple(range(count)),
        steps=STEPS,
        step_s=step_s,
        service_slow_s=rng.choice((0.01, 0.01, 0.01, 0.2)),
        writes_s=tuple(writes),
    )
    return Plan(seed, count, "all_but_primary", 1, 0, (life,))


def run(seed: int) -> Counter[str]:
    """Run one job; the judge says whether enough saves were complete."""
    from history import History  # noqa: PLC0415 - it imports the product under the simulation

    root = Path(tempfile.mkdtemp(prefix="eckpt-simulation-", dir="/dev/shm"))
    try:
        History(draw(seed), root).run()
    finally:
        shutil.rmtree(root)
    return Counter(jobs=1)


if __name__ == "__main__":
    run_seeds(run, first=1)
