"""The demo's events: one JSON object per line, appended by the processes, read by the timeline.

Each process appends to its own file. A kill leaves at most one truncated line, at the end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

LINE_LIMIT_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoEvent:
    """One event of the job.

    Attributes:
      time_s: Unix time, for display and for the length of a recovery.
      name: dotted name: ``train.*`` from the loop, ``save.*``, ``persistent.*`` and ``restore.*``
        from the checkpointer, and those of ``launch.job.JobEvent``.
      life: 0 for the first start of the job, one more for each restart.
      process: the process that emitted it, None for the launcher.
      slice_index: the slice of that process, None for the launcher.
      fields: details; numbers, strings, booleans, None.
    """

    time_s: float
    name: str
    life: int
    process: int | None = None
    slice_index: int | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def encode_event(event: DemoEvent) -> bytes:
    """Return one line of JSON. Raises ValueError when it is over ``LINE_LIMIT_BYTES``."""
    line = json.dumps(dataclasses.asdict(event), default=str).encode() + b"\n"
    if len(line) > LINE_LIMIT_BYTES:
        raise ValueError(f"encode event {event.name}: {len(line)} bytes, over {LINE_LIMIT_BYTES}")
    return line


def decode_event(line: bytes) -> DemoEvent:
    """Return the event encoded in ``line``. Raises ValueError for anything else."""
    if len(line) > LINE_LIMIT_BYTES:
        raise ValueError(f"decode event: {len(line)} bytes in a line, over {LINE_LIMIT_BYTES}")
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("decode event: the line is not a JSON object")
    try:
        return DemoEvent(**cast("dict[str, Any]", document))
    except TypeError as error:
        raise ValueError(f"decode event: {error}") from error


class EventLog:
    """Appends the events of one process. Any thread may call ``emit``."""

    def __init__(self, path: Path | None, *, life: int, process: int, slice_index: int) -> None:
        """``path``: None discards the events."""
        self._life = life
        self._process = process
        self._slice_index = slice_index
        self._descriptor: int | None = None
        if path is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o644)
            # Ends a line that a killed predecessor may have truncated; readers skip empty lines.
            os.write(self._descriptor, b"\n")

    def emit(self, name: str, fields: Mapping[str, Any], time_s: float | None = None) -> None:
        """Append one event; ``time_s`` is now unless given."""
        if self._descriptor is None:
            return
        event = DemoEvent(
            time_s=time.time() if time_s is None else time_s,
            name=name,
            life=self._life,
            process=self._process,
            slice_index=self._slice_index,
            fields=fields,
        )
        os.write(self._descriptor, encode_event(event))


class EventTail:
    """Reads the lines appended to the ``*.jsonl`` files below a directory since the last call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def read_new(self) -> list[DemoEvent]:
        """Return the new events by time. An unfinished line waits for the next call.

        A truncated line was the last of a killed process and is skipped.
        """
        events: list[DemoEvent] = []
        for path in sorted(self._directory.rglob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            events.extend(_decode_lines(whole))
        return sorted(events, key=lambda event: event.time_s)


def _decode_lines(block: bytes) -> list[DemoEvent]:
    events: list[DemoEvent] = []
    for line in block.split(b"\n"):
        try:
            events.append(decode_event(line))
        except ValueError:
            continue
    return events
