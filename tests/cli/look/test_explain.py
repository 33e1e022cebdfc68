"""``eckpt ls --explain`` of logs that a person may name; ``tests/system`` has one of a real job."""

from __future__ import annotations

from pathlib import Path

from looks import eckpt, eckpt_json, tree_of

from emergency_ckpt.extras.event_log import LoggedEvent, encode_line

FILE = "events_00000.jsonl"


def write(directory: Path, *events: tuple[float, str, dict[str, object]]) -> None:
    lines = [
        encode_line(LoggedEvent(time_s=time_s, name=name, process=0, run_id="r", fields=fields))
        for time_s, name, fields in events
    ]
    (directory / FILE).write_bytes(b"".join(lines))


def test_explain_of_finished_restore_tells_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        (1, "restore.stage", {"stage": "started", "requested_step": None}),
        (2, "restore.stage", {"stage": "planned", "step": 40, "tier": "local"}),
        (2, "restore.rejected", {"step": 41, "tier": "local", "reason": "held nowhere: w\x1b[2J"}),
        (4, "restore.stage", {"stage": "fetched", "step": 40, "bytes_local": 7, "bytes_peer": 0}),
        (5, "restore.finished", {"step": 40, "tier": "local", "bytes_local": 7}),
    )
    before = tree_of(tmp_path)
    done = eckpt("ls", "--explain", tmp_path)
    assert tree_of(tmp_path) == before
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 40 was restored from RAM, in 4 s" in done.stdout
    assert r"step 41 in RAM: held nowhere: w\x1b[2J" in done.stdout
    status, story = eckpt_json("ls", "--explain", tmp_path)
    assert (status, story["step"], story["processes"][0]["phases"]["fetch"]) == (0, 40, 2.0)


def test_explain_of_failed_restore_is_status_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        (1, "restore.stage", {"stage": "started"}),
        (2, "restore.failed", {"reason": "all is lost"}),
    )
    done = eckpt("ls", "--explain", tmp_path)
    assert done.returncode == 1
    assert "the restore failed" in done.stdout
    assert "all is lost" in done.stdout


def test_explain_without_a_restore_is_status_1(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        done = eckpt("ls", "--explain", directory)
        assert (done.returncode, done.stdout) == (1, "")
        assert str(directory) in done.stderr
    (tmp_path / FILE).write_text("junk\n{}\n")
    done = eckpt("ls", "--explain", tmp_path)
    assert done.returncode == 1
    assert "2 lines are no event and left out" in done.stderr
    assert eckpt("ls", "--explain").returncode == 2
