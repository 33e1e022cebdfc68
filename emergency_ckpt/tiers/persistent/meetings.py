"""The points at which the writers of a step wait for each other."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

BEGUN = "tensors_begun"
WRITTEN = "tensors_written"
MEETINGS = (BEGUN, WRITTEN)
"""Meeting points: the first writer has made the folders; all writers have written, so the first
commits."""

Meet = Callable[[str, Sequence[int], float], None]
"""Tells the other writers that this one has reached a meeting point, and waits for some of them.

Its arguments are one of ``MEETINGS``, the writers to wait for, and a deadline of
``time.monotonic``. Raises at the deadline, or when one of them has failed.
"""


def meet_nobody(name: str, others: Sequence[int], deadline_s: float) -> None:
    """Do nothing: the ``Meet`` of a single writer."""
    del name, others, deadline_s


def new_attempt() -> str:
    """Return a name for one attempt to write a step, which no other attempt has."""
    return secrets.token_hex(8)
