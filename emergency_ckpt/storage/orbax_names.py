"""Names of the files by which Orbax knows a step and its items."""

from __future__ import annotations

from collections.abc import Iterable

STEP_METADATA = "_CHECKPOINT_METADATA"
"""The document of a step, which its manager writes."""

COMMITTED = "commit_success.txt"
"""In a bucket, the name of the objects by which finished steps and items are recognised."""

TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
"""In a file system, the end of the name of a step's folder before its commit."""

OWN_TEMPORARY = f"{TEMPORARY_SUFFIX}-eckpt-"
"""This package's end of that name, before the name of the attempt: so the folder's owner is known,
and no attempt writes into the folder of another."""

MANIFEST = "manifest.ocdbt"
"""The root of an item's database. TensorStore chooses the name."""

TREE = "_METADATA"
"""The document of an item with arrays, which has the item's tree."""

ROOT_METADATA = "metadata"
"""The folder beside the steps with the metadata that were given to Orbax's manager."""


def commits_of(items: Iterable[str]) -> list[str]:
    """Return the files by which Orbax counts a step in a bucket, in the order of their creation."""
    return [*(f"{item}/{COMMITTED}" for item in items), COMMITTED]
