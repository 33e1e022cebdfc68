"""The way of one call through the package: rooms that it enters and climbs on the way, counted.

A room is a folder right below the package. The modules beside the folders are the door
(``checkpointer``) and what every room uses (``events``, ``errors``, ``types``). A climb is a call
from a module to one of a higher layer of ``pyproject.toml``, counted once for each pair of
functions: a reader has to leave the room and look who gave the callback. Generators count, for
whoever resumes one runs its code. Only the thread of the caller is walked, and no listener of
events: to read a restore, nobody follows an event into the log and the metrics.
"""

from __future__ import annotations

import sys
import threading
import tomllib
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import emergency_ckpt

PACKAGE = Path(emergency_ckpt.__file__).parent
END_OF_SAVE = ("state.snapshot", "SnapshotRecipe.take")
FIRST_BYTES = {
    "local": ("restore.shards", "ShardCollection.collecting"),
    "persistent": ("storage.tier", "read_into"),
}


def layers() -> dict[str, int]:
    """Number of the layer of each entry, the highest first."""
    contracts = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
    (found,) = (each for each in contracts if each.get("containers") == ["emergency_ckpt"])
    entries = (layer.replace(":", "|").split("|") for layer in found["layers"])
    return {entry.strip(): number for number, names in enumerate(entries) for entry in names}


class Walk:
    """Calls within the package on one thread, until the code named ``end`` is called on any."""

    def __init__(self, end: tuple[str, str]) -> None:
        self.ended = False
        self.calls: set[tuple[tuple[str, str] | None, tuple[str, str]]] = set()
        self._end = end
        self._thread = threading.get_ident()

    def __enter__(self) -> Walk:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self.ended:
            return
        called = _place(frame.f_code)
        if called is None:
            return
        if threading.get_ident() == self._thread and not _is_below(frame, "events"):
            self.calls.add((_caller(frame), called))
        module, name = self._end
        self.ended = called[0] == module and called[1].endswith(name)

    @property
    def modules(self) -> set[str]:
        return {module for _, (module, _) in self.calls}

    @property
    def rooms(self) -> set[str]:
        return {module.partition(".")[0] for module in self.modules if "." in module}

    @property
    def hops(self) -> int:
        """Return how many calls lead from one file to another, each pair of functions once."""
        return sum(caller is not None and caller[0] != called[0] for caller, called in self.calls)

    @property
    def climbs(self) -> list[tuple[tuple[str, str], tuple[str, str]]]:
        number = layers()
        return sorted(
            (caller, called)
            for caller, called in self.calls
            if caller is not None
            and number[called[0].partition(".")[0]] < number[caller[0].partition(".")[0]]
        )


def _place(code: CodeType) -> tuple[str, str] | None:
    """Module within the package, and function; None for code from elsewhere."""
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__"), code.co_qualname


def _caller(frame: FrameType) -> tuple[str, str] | None:
    """The nearest code of the package that ``frame`` was called from, through other libraries."""
    above = frame.f_back
    while above is not None:
        place = _place(above.f_code)
        if place is not None:
            return place
        above = above.f_back
    return None


def _is_below(frame: FrameType, module: str) -> bool:
    """Return whether code of ``module`` has called this code, directly or not."""
    above = frame.f_back
    while above is not None:
        place = _place(above.f_code)
        if place is not None and place[0] == module:
            return True
        above = above.f_back
    return False
