"""Faults by name: each makes one part of the product fail, wait, or meet a bound.

Tests say what goes wrong; where in the product that is, only this file knows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from memory_coordination import MemoryService

from emergency_ckpt.cluster import membership
from emergency_ckpt.event_log import log_writer
from emergency_ckpt.storage import step_reader


def event_log_retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a log that could not be written try again with the next event."""
    monkeypatch.setattr(log_writer, "_RETRY_S", 0.0)


def event_log_waits(
    monkeypatch: pytest.MonkeyPatch, may_write: threading.Event, most_waiting: int
) -> None:
    """Hold each write of an event log until ``may_write``, and at most so many events meanwhile."""
    monkeypatch.setattr(log_writer, "MAX_WAITING", most_waiting)
    append = log_writer.LogFiles.append

    def append_later(files: log_writer.LogFiles, *values: Any) -> Any:
        may_write.wait()
        return append(files, *values)

    monkeypatch.setattr(log_writer.LogFiles, "append", append_later)


MOST_EVENTS_WAITING = log_writer.MAX_WAITING


def leaves_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """Let commands that read a step read at most so many bytes of a leaf at a time."""
    monkeypatch.setattr(step_reader, "PIECE_BYTES", size_bytes)


@contextmanager
def coordinated_by(service: MemoryService) -> Iterator[None]:
    """Let checkpointers of this process coordinate by ``service``, as its process 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "connect", lambda _: service.member(0))
        yield
