"""Directories that hold what no process has written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.limits import MAX_LINE_BYTES
from emergency_ckpt.extras.event_log import LoggedEvent, decode_line, encode_line, read_events

GOOD = encode_line(LoggedEvent(time_s=5.0, name="save.complete", process=1, fields={"step": 2}))


def written(directory: Path, data: bytes, name: str = "events_00001.jsonl") -> None:
    (directory / name).write_bytes(data)


@pytest.mark.parametrize(
    "line",
    [
        b"{'a'",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"time_s": 1.0}',
        b'{"time_s": -1.0, "name": "a", "process": 0}',
        b'{"time_s": 1e300, "name": "a", "process": 0}',
        b'{"time_s": NaN, "name": "a", "process": 0}',
        b'{"time_s": "1", "name": "a", "process": 0}',
        b'{"time_s": 1.0, "name": "a", "process": -1}',
        b'{"time_s": 1.0, "name": "a", "process": 1e10}',
        b'{"time_s": 1.0, "name": "", "process": 0}',
        b'{"time_s": 1.0, "name": "a", "process": 0, "fields": []}',
        b'{"time_s": 1.0, "name": "a", "process": 0, "fields": {"x": ' + b"[" * 20000,
        b'{"time_s": 1.0, "name": "' + b"a" * 200 + b'", "process": 0}',
        b'{"fields": {"x": "' + b"a" * MAX_LINE_BYTES,
        b"\0" * 100,
    ],
)
def test_reader_bad_line_is_counted_and_passed(tmp_path: Path, line: bytes) -> None:
    written(tmp_path, GOOD + line + b"\n" + GOOD + line)
    found = read_events(tmp_path)
    assert [each.fields for each in found.events] == [{"step": 2}, {"step": 2}]
    assert found.bad_lines >= 2


@given(st.binary(max_size=300))
def test_reader_any_bytes_are_read(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        written(Path(directory), data + b"\n" + GOOD)
        assert read_events(directory).events[-1:] != ()


@given(
    st.builds(
        LoggedEvent,
        time_s=st.floats(0, 1e10),
        name=st.text(min_size=1, max_size=40),
        process=st.none() | st.integers(0, 1000),
        run_id=st.text(max_size=20),
        fields=st.dictionaries(st.text(max_size=5), st.none() | st.integers(0, 9) | st.text()),
    )
)
def test_line_decodes_to_what_was_encoded(event: LoggedEvent) -> None:
    assert decode_line(encode_line(event)) == event


def test_reader_foreign_files_are_passed_over(tmp_path: Path) -> None:
    written(tmp_path, GOOD)
    written(tmp_path, GOOD, "events_1.jsonl")
    written(tmp_path, GOOD, "notes.txt")
    written(tmp_path, GOOD, "events_00001.jsonl.gz")
    (tmp_path / "events_00002.jsonl").mkdir()
    os.mkfifo(tmp_path / "events_00003.jsonl")
    (tmp_path / "events_00004.jsonl").symlink_to(tmp_path / "events_00001.jsonl")
    (tmp_path / "events_00005.jsonl").symlink_to("/dev/zero")
    found = read_events(tmp_path)
    assert (len(found.events), found.files, found.unreadable) == (1, 1, ())


def test_reader_large_log_gives_newest_of_each_file(tmp_path: Path) -> None:
    for process in (1, 2):
        lines = [
            encode_line(
                LoggedEvent(time_s=float(t), name="a", process=process, fields={"x": "y" * 100})
            )
            for t in range(1000)
        ]
        written(tmp_path, b"".join(lines), f"events_0000{process}.jsonl")
    found = read_events(tmp_path, limit_bytes=20_000)
    assert found.is_cut
    assert found.bad_lines == 0
    assert 40 < len(found.events) < 200
    for process in (1, 2):
        times = [each.time_s for each in found.events if each.process == process]
        assert times == [float(t) for t in range(1000 - len(times), 1000)]


def test_reader_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_events(tmp_path / "absent")
