"""The points at which the writers of a step wait for each other."""

from __future__ import annotations

import secrets
from collections.abc import Callable

BEGUN = "tensors_begun"
"""The first writer has made the folders; the others wait for it."""
WRITTEN = "tensors_written"
"""A writer has written; the first one waits for all, and commits."""

Meet = Callable[[str], None]
"""Tells the other writers that this one has come to a meeting point, and waits for those it needs.

Its argument is one of those above. Raises at the deadline, or when another writer has failed.
"""


def meet_nobody(name: str) -> None:
    """Do nothing: the ``Meet`` of a single writer."""
    del name


def new_attempt() -> str:
    """Return a name for one attempt to write a step, which no other attempt has."""
    return secrets.token_hex(8)
