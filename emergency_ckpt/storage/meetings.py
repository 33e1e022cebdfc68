"""The points at which the writers of a step wait for each other."""

from __future__ import annotations

import secrets
from collections.abc import Callable

BEGUN = "tensors_begun"
"""The first writer has made the folders, for which the others wait."""
WRITTEN = "tensors_written"
"""A writer has written; the first writer waits for all, and commits."""

Meet = Callable[[str], None]
"""Reports that this writer is at a meeting point, and waits for the writers that it needs.

The argument is one of the names above. Raises at the deadline, or when another writer has failed.
"""


def meet_nobody(name: str) -> None:
    """Do nothing: the ``Meet`` of a single writer."""
    del name


def new_attempt() -> str:
    """Return a name for one attempt to write a step, which no other attempt has."""
    return secrets.token_hex(8)
