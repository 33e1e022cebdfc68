"""The record of a process: what is written, what survives, and that nothing disturbs training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from absl import logging
from faults import MOST_EVENTS_WAITING, event_log_retries_at_once, event_log_waits

from emergency_ckpt.core.limits import MAX_LINE_BYTES
from emergency_ckpt.events import Event, EventSink, Origin
from emergency_ckpt.extras.event_log import (
    EventHistory,
    EventLog,
    LogTail,
    open_event_log,
    read_events,
)

LIMIT = 64 << 20


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings that were logged."""
    lines: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    return lines


@pytest.fixture
def quick_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    event_log_retries_at_once(monkeypatch)


def event(number: int, name: str = "save.complete", **fields: object) -> Event:
    origin = Origin(3, 1, "run7", "life-a")
    return Event(name, {"process": 3, "step": number, **fields}, 1000.0 + number, origin)


def opened(directory: Path, process: int | None = 3, limit_bytes: int = LIMIT) -> EventLog:
    return open_event_log(directory, process, limit_bytes=limit_bytes)


def write_log(directory: Path, *events: Event, process: int | None = 3) -> None:
    log = opened(directory, process)
    for each in events:
        log(each)
    log.close()


def steps(history: EventHistory) -> list[int]:
    return [each.fields["step"] for each in history.events if each.name == "save.complete"]


def wait_for(directory: Path, count: int) -> EventHistory:
    """Return the events once ``count`` saves are there; the test's timeout is the deadline."""
    while True:
        found = read_events(directory) if directory.exists() else None
        if found is not None and len(steps(found)) >= count:
            return found
        time.sleep(0.005)


def test_log_line_has_place_and_fields(tmp_path: Path) -> None:
    write_log(tmp_path / "made" / "deep", event(7, tier="local", seconds=0.5))
    (path,) = (tmp_path / "made" / "deep").iterdir()
    assert path.name == "events_00003.jsonl"
    assert json.loads(path.read_bytes()) == {
        "time_s": 1007.0,
        "name": "save.complete",
        "process": 3,
        "slice": 1,
        "run_id": "run7",
        "incarnation": "life-a",
        "fields": {"step": 7, "tier": "local", "seconds": 0.5},
        "life": 0,
    }


def test_log_normal_stop_loses_nothing(tmp_path: Path) -> None:
    write_log(tmp_path, *map(event, range(5000)))
    found = read_events(tmp_path)
    assert steps(found) == list(range(5000))
    assert (found.bad_lines, found.is_cut) == (0, False)


def test_log_restart_appends_beside_other_processes(tmp_path: Path) -> None:
    for number, process in enumerate([3, 4, 3, None]):
        write_log(tmp_path, event(number), process=process)
    assert steps(read_events(tmp_path)) == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "events_00003.jsonl",
        "events_00004.jsonl",
        "events_launcher.jsonl",
    ]


def test_log_two_users_of_a_program_share_a_file(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    first(event(1))
    first.close()
    second(event(2))
    second.close()
    assert steps(read_events(tmp_path)) == [1, 2]
    assert len(list(tmp_path.iterdir())) == 1


def test_log_rotation_keeps_newest_within_limit(tmp_path: Path) -> None:
    limit = 4 * MAX_LINE_BYTES
    log = opened(tmp_path, limit_bytes=limit)
    for number in range(4000):
        log(event(number, text="x" * 200))
        if number % 100 == 0:
            wait_for(tmp_path, 1)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [
        "events_00003.1.jsonl",
        "events_00003.2.jsonl",
        "events_00003.3.jsonl",
        "events_00003.jsonl",
    ]
    # A batch of the writer is never split: the last one may stand above the share of a file.
    largest_batch = 256 * 600
    assert sum(path.stat().st_size for path in files) <= limit + 4 * largest_batch
    kept = steps(read_events(tmp_path))
    assert kept == list(range(kept[0], 4000))
    assert kept[0] > 0


WRITER = """
import sys, time
from pathlib import Path
from emergency_ckpt.extras.event_log import open_event_log
from emergency_ckpt.events import Event, Origin
log = open_event_log(Path(sys.argv[1]), 3, limit_bytes=1 << 26)
number = 0
while True:
    log(Event("save.complete", {"step": number}, 1000.0 + number, Origin(3)))
    number += 1
    print(number, flush=True)
    time.sleep(0.0005)
"""


def started_writer(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True
    )


def killed_at(process: subprocess.Popen[str], number: int) -> int:
    """Kill the writer once it has emitted ``number`` events; return how many it had emitted."""
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= number:
            break
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.stdout.close()
    process.wait()
    return int(rest[-1]) if rest else number


def test_log_sigkill_loses_a_bounded_tail(tmp_path: Path) -> None:
    emitted = killed_at(started_writer(tmp_path), 300)
    found = steps(read_events(tmp_path))
    assert found == list(range(len(found)))  # a tail, and nothing in between
    assert emitted - MOST_EVENTS_WAITING < len(found) <= emitted + 1
    assert found


def test_log_line_cut_by_a_kill_is_the_only_loss(tmp_path: Path) -> None:
    write_log(tmp_path, event(1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + b'{"time_s": 5.0, "na')
    write_log(tmp_path, event(2))
    found = read_events(tmp_path)
    assert (steps(found), found.bad_lines) == ([1, 2], 1)


def test_log_twin_of_a_process_has_its_own_file(tmp_path: Path) -> None:
    first = started_writer(tmp_path)
    wait_for(tmp_path, 1)
    write_log(tmp_path, event(-5))
    killed_at(first, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "events_00003-2.jsonl",
        "events_00003.jsonl",
    ]
    assert -5 in steps(read_events(tmp_path))


@pytest.mark.usefixtures("quick_retry")
def test_log_removed_directory_is_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    log = opened(directory)
    log(event(1))
    wait_for(directory, 1)
    shutil.rmtree(directory)
    log(event(2))
    log.close()
    assert steps(read_events(directory)) == [2]


@pytest.mark.usefixtures("quick_retry")
def test_log_directory_in_the_way_is_said_once(tmp_path: Path, told: list[str]) -> None:
    directory = tmp_path / "log"
    directory.write_text("a file")
    log = opened(directory)
    for number in range(20):
        log(event(number))
        time.sleep(0.002)
    assert len(told) == 1
    assert str(directory) in told[0]
    directory.unlink()
    log(event(99))
    log.close()
    found = read_events(directory)
    # What the thread of the log had not come to yet was written once the directory was free.
    late = steps(found)
    lost = [each.fields["count"] for each in found.events if each.name == "log.lost"]
    assert late == [*range(20 - len(late) + 1, 20), 99]
    assert lost == [20 - len(late) + 1]


FULL = """
import resource, signal, sys, time
from pathlib import Path
from absl import logging
from emergency_ckpt.extras import event_log
from emergency_ckpt.events import Event, Origin
told = []
logging.warning = lambda text, *values: told.append(text % values)
event_log._RETRY_S = 0.0
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
log = event_log.open_event_log(Path(sys.argv[1]), 3, limit_bytes=1 << 26)
for number in range(100):
    log(Event("save.complete", {"step": number}, 1000.0 + number, Origin(3)))
    time.sleep(0.001)
log.close()
print(len(told), "events are dropped" in told[0])
"""


def test_log_without_room_drops_and_is_said_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "True"]
    found = read_events(tmp_path)
    assert steps(found) == list(range(len(found.events)))
    assert 0 < len(found.events) < 100
    assert found.bad_lines <= 1


def test_log_waiting_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that is silent: the thread hangs in its first write."""
    may_write = threading.Event()
    event_log_waits(monkeypatch, may_write, most_waiting=10)
    log = opened(tmp_path)
    for number in range(2000):
        log(event(number))
    may_write.set()
    wait_for(tmp_path, 5)
    log(event(-1))
    log.close()
    found = read_events(tmp_path)
    lost = sum(each.fields["count"] for each in found.events if each.name == "log.lost")
    assert lost > 1000
    assert lost + len(steps(found)) == 2001


def test_log_of_a_forked_child_is_off(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log(event(1))
    wait_for(tmp_path, 1)
    child = os.fork()
    if child == 0:
        log(event(2))
        log.close()
        os._exit(0)
    os.waitpid(child, 0)
    log(event(3))
    log.close()
    assert steps(read_events(tmp_path)) == [1, 3]


class _Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [1 << 80, float("nan"), "\udc80", b"\xff", {1: {2: (3,)}}, _Rude(), {"a", 1}, Path("/x"), None],
)
def test_log_takes_any_value(tmp_path: Path, value: object) -> None:
    write_log(tmp_path, event(1, value=value))
    (line,) = read_events(tmp_path).events
    assert "value" in line.fields


def test_log_cuts_fields_that_are_too_long(tmp_path: Path) -> None:
    write_log(tmp_path, event(1, text="x" * 2 * MAX_LINE_BYTES))
    (line,) = read_events(tmp_path).events
    assert line.fields["text"].startswith("'xxx")
    assert len(line.fields["text"]) == 500


def test_sink_close_writes_what_was_emitted(tmp_path: Path) -> None:
    sink, log = EventSink(None, process_index=3), opened(tmp_path)
    sink.add(log)
    sink.on_close(log.close)
    sink.locate(slice_index=1, run_id="run7")
    sink.emit("save.complete", step=1)
    sink.locate(incarnation="b")
    sink.emit("save.complete", step=2)
    sink.close()
    sink.emit("save.complete", step=3)
    found = read_events(tmp_path)
    assert steps(found) == [1, 2]
    assert [(e.slice, e.run_id, e.incarnation) for e in found.events] == [
        (1, "run7", ""),
        (1, "run7", "b"),
    ]


@pytest.fixture
def tail(tmp_path: Path) -> LogTail:
    return LogTail(tmp_path / "log")


def test_tail_gives_each_event_once(tmp_path: Path, tail: LogTail) -> None:
    assert tail.read_new() == []
    log = opened(tmp_path / "log")
    for number in (1, 2):
        log(event(number))
        while not (found := tail.read_new()):
            time.sleep(0.002)
        assert [each.fields["step"] for each in found] == [number]
    log.close()
    assert tail.read_new() == []


def test_tail_waits_for_a_whole_line(tmp_path: Path, tail: LogTail) -> None:
    write_log(tmp_path / "log", event(1))
    (path,) = (tmp_path / "log").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    assert tail.read_new() == []
    path.write_bytes(whole + whole[:20])
    assert [each.fields["step"] for each in tail.read_new()] == [1]
    write_log(tmp_path / "log", event(2))
    assert [each.fields["step"] for each in tail.read_new()] == [2]
