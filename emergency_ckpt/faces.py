"""The face of a room: names that its ``__init__`` offers, and that are imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def face_of(room: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of the package ``room``. AttributeError for any other name.

    On first use, because some modules of a room are imported by programs that start without JAX or
    numpy.

    Args:
      homes: the module below ``room`` of each name.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{homes[name]}"), name)

    return find
