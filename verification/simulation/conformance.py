"""Versions of the log that the lives of a history wrote, replayed against the actions of the model.

``verification/model/StepLog.tla`` is what TLC has checked. A version that none of its actions
allows shows that the product does something else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import oracle
import storage

MODEL = Path(__file__).resolve().parents[1] / "model"
sys.path.insert(0, str(MODEL))

import replay  # noqa: E402

sys.path.remove(str(MODEL))


class Conformance:
    """The replay of one history in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._state = replay.State()
        self._index = 0

    def follow(self, created: Mapping[str, bytes]) -> str:
        """Replay what came since the last call; return why the model refuses it, or "".

        No process may run. ``created``: the bytes of each numbered file of ``directory``, by path,
        as they were first. The files of the steps are looked at as they are now.
        """
        try:
            for event in self._events(created):
                replay.step(self._state, event, self._index)
                self._index += 1
        except replay.Refused as refused:
            return f"the model of the step log refuses {refused}"
        except (ValueError, KeyError) as error:
            return (
                f"after version {self._state.number}, the log has one that is not whole: {error!r}"
            )
        return ""

    def _events(self, created: Mapping[str, bytes]) -> Iterator[replay.Event]:
        found = {int(Path(path).stem): data for path, data in created.items()}
        folder = self._directory / "host_state" / "log"
        for name in os.listdir(folder) if folder.is_dir() else ():
            if name.endswith(".json"):  # also one whose writer died right after
                found.setdefault(int(name[:-5]), (folder / name).read_bytes())
        for number in sorted(found):
            if number > self._state.number:
                yield self._version(found[number])
        saves = [save for save in self._state.entries if self._is_there(save)]
        yield {"kind": "files", "present": saves}

    def _version(self, data: bytes) -> replay.Event:
        version: dict[str, Any] = json.loads(data)["version"]
        table = [
            (entry["step"], entry["incarnation"], entry.get("state", "complete"))
            for entry in version.get("steps", ())
        ]
        return {
            "kind": "version",
            "number": version["number"],
            "incarnation": version["incarnation"],
            "chain": version.get("chain"),
            "steps": table,
        }

    def _is_there(self, save: replay.Save) -> bool:
        """Return whether a step's tensors, hidden or not, and its documents are there."""
        step, incarnation = save
        names = (str(step), f"{step}.rolled-back-{incarnation}")
        tensors = [self._directory / name / storage.METADATA for name in names]
        has_tensors = any(p.is_file() and incarnation in p.read_text() for p in tensors)
        return has_tensors and _has_documents(self._directory / "host_state" / str(step), save)


def _has_documents(folder: Path, save: replay.Save) -> bool:
    found = oracle.load(folder / "marker.json", "marker")
    if found is None:
        return False
    marker = found["marker"]
    count = len(marker["digests"])
    is_it = (marker["save"]["step"], marker["save"]["incarnation"]) == save
    names = [f"process_{number:05}_of_{count:05}.json" for number in range(count)]
    return is_it and all((folder / name).is_file() for name in names)
