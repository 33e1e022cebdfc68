"""The command line of a program that tries schedules: ``SEEDS [FIRST]``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import install


def run_seeds(run: Callable[[int], Counter[str]], first: int) -> None:
    """Run as many seeds as asked for; print the ends that were seen, or exit at one that failed."""
    install.product()
    first = int(sys.argv[2]) if len(sys.argv) > 2 else first
    total: Counter[str] = Counter()
    for at in range(first, first + int(sys.argv[1])):
        try:
            total += run(at)
        except AssertionError as error:
            print(f"seed {at}: {type(error).__name__}: {error}")
            sys.exit(1)
    print(dict(sorted(total.items())))
