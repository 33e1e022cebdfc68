"""The faults that a process of the soak carries out on itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import soak_program
from soak_program import Journal, KillAt, Listener

from emergency_ckpt.events import Event, Origin

CAPTURED = Event("save.captured", {"step": 5}, 0.0, Origin(0))


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sent: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid()
        sent.append(number)

    monkeypatch.setattr(soak_program.os, "kill", kill)
    return sent


def test_kill_of_a_life_waits_until_all_have_restored(tmp_path: Path, kills: list[int]) -> None:
    settled = tmp_path / "settled"
    kill_at = KillAt("save.captured", 2, in_restore=False)
    listener = Listener(Journal(tmp_path / "journal"), kill_at, settled)
    for _ in range(3):
        listener(CAPTURED)
    settled.touch()
    listener(CAPTURED)
    assert kills == []
    listener(CAPTURED)
    assert kills == [signal.SIGKILL]


def test_kill_of_a_restore_waits_for_its_event_alone(tmp_path: Path, kills: list[int]) -> None:
    kill_at = KillAt("save.captured", 1, in_restore=True)
    listener = Listener(Journal(tmp_path / "journal"), kill_at, tmp_path / "settled")
    listener(Event("save.started", {"step": 5}, 0.0, Origin(0)))
    assert kills == []
    listener(CAPTURED)
    assert kills == [signal.SIGKILL]
