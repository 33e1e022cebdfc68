"""Another user of the host made a directory first: nothing in it is believed, and it is said."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from looks import eckpt_here
from places import JOBS
from tiers_support import (
    LAYOUT,
    RUN_ID,
    complete_save,
    document,
    held_steps,
    make_old,
    open_tier,
    save_id,
)

from emergency_ckpt import files
from emergency_ckpt.errors import LocalTierError, RamdiskFull
from emergency_ckpt.ram import LocalTier, left_runs
from emergency_ckpt.run_secret import generate_secret
from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")

PROGRAM = JOBS / "stranger_program.py"
STRANGER, JOB = 65533, 65532


def as_user(uid: int, local_dir: Path, what: str) -> str:
    program = [sys.executable, str(PROGRAM), str(uid), str(local_dir), what]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


@pytest.fixture
def shared(ramdisk: Path) -> Path:
    """A place where everybody may make directories, as /dev/shm."""
    ramdisk.chmod(0o1777)
    return ramdisk


def give(path: Path, uid: int) -> None:
    for each in [path, *path.rglob("*")]:
        os.chown(each, uid, uid, follow_symlinks=False)


def test_open_of_a_strangers_local_dir_says_how_to_mend(shared: Path) -> None:
    local_dir = shared / "eckpt"
    assert as_user(STRANGER, local_dir, "plant") == "planted"
    with pytest.raises(
        LocalTierError, match=rf"belongs to user {STRANGER}, .* chown 0 {local_dir}"
    ):
        open_tier(local_dir)
    assert as_user(JOB, local_dir, "open").startswith(f"claim {local_dir}: it belongs to user")


def test_open_of_a_strangers_run_directory_is_refused(shared: Path) -> None:
    assert as_user(STRANGER, shared, "plant") == "planted"
    shared.chmod(0o1777)
    with pytest.raises(LocalTierError, match=rf"{RUN_ID}: it belongs to user {STRANGER}"):
        open_tier(shared)
    assert f"{RUN_ID}: it belongs to user {STRANGER}" in as_user(JOB, shared, "open")


def test_open_below_a_shared_sticky_directory_is_closed(shared: Path) -> None:
    assert as_user(JOB, shared, "open") == "[7] 0o700"
    assert as_user(JOB, shared / "own", "open") == "[7] 0o700"


@pytest.mark.parametrize("mode", [0o777, 0o2777, 0o775])
def test_open_of_a_local_dir_open_to_writers_is_refused(ramdisk: Path, mode: int) -> None:
    """Also as Kubernetes mounts an emptyDir with an fsGroup: one inside it is the way."""
    ramdisk.chmod(mode)
    with pytest.raises(LocalTierError, match=rf"others may write in it \(mode {mode:04o}\); chmod"):
        open_tier(ramdisk)
    tier = open_tier(ramdisk / "eckpt")
    complete_save(tier, 1)
    tier.close()
    assert (ramdisk / "eckpt").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("inner", [".", "process_00000", "process_00000/host_state"])
@pytest.mark.parametrize("change", ["owner", "mode"])
def test_open_with_an_inner_directory_of_others_is_refused(
    ramdisk: Path, inner: str, change: str
) -> None:
    tier = open_tier(ramdisk)
    complete_save(tier, 1)
    tier.close()
    directory = ramdisk / RUN_ID / inner
    if change == "owner":
        os.chown(directory, STRANGER, STRANGER)
    else:
        directory.chmod(0o770)
    expected = "belongs to user" if change == "owner" else r"open to others \(mode 0770\).*chmod -R"
    with pytest.raises(LocalTierError, match=expected):
        open_tier(ramdisk)


@pytest.mark.parametrize("level", ["local_dir", "run", "process"])
def test_open_through_a_symlinked_directory_is_refused(ramdisk: Path, level: str) -> None:
    elsewhere = ramdisk / "elsewhere"
    tier = open_tier(elsewhere)
    complete_save(tier, 1_000_000)
    tier.close()
    local_dir = ramdisk / "local"
    places = {
        "local_dir": (local_dir, elsewhere),
        "run": (local_dir / RUN_ID, elsewhere / RUN_ID),
        "process": (local_dir / RUN_ID / "process_00000", tier.path),
    }
    link, target = places[level]
    link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    link.parent.chmod(0o700)
    link.symlink_to(target)
    if level == "process":
        with closing(open_tier(local_dir)) as opened:
            assert held_steps(opened) == []
            assert opened.path.name == "process_00000.1"
        return
    with pytest.raises(LocalTierError, match="it is a link"):
        open_tier(local_dir)


def test_open_takes_no_file_of_another_user(ramdisk: Path, tier: LocalTier) -> None:
    tier.reserve(LAYOUT.size_bytes)
    for step in (1, 2, 3):
        complete_save(tier, step)
    tier.publish_host_state(save_id(3), 0, 4, document(3))
    tier.close()
    newest = {path.name for path in tier.path.glob("*.manifest.json")}
    for name in newest:
        os.chown(tier.path / name, STRANGER, STRANGER)
    (tier.path / "host_state" / "000000000001-first-3" / "process_00000_of_00004.json").chmod(0o666)
    with closing(open_tier(ramdisk)) as again:
        assert held_steps(again) == []
        assert again.held()[1] == ()
        problems = " ".join(record.problem for record in again.quarantined)
        assert f"belongs to user {STRANGER}" in problems
        assert "others may write to it (mode 0666)" in problems


def test_serve_offers_nothing_of_another_user(shared: Path) -> None:
    tier = open_tier(shared / "eckpt")
    complete_save(tier, 1)
    tier.close()
    assert "serve" in as_user(JOB, shared / "eckpt", "serve")
    give(shared / "eckpt", JOB)
    assert as_user(JOB, shared / "eckpt", "serve") == "[1]"
    with pytest.raises(LocalTierError, match=f"belongs to user {JOB}, not to user 0"):
        ReadOnlyRamdisk(shared / "eckpt", RUN_ID)
    with closing(ReadOnlyRamdisk(shared / "eckpt", RUN_ID, JOB)) as reader:
        assert [held.save.step for held in reader.inventory().tensors] == [1]
    give(shared / "eckpt" / RUN_ID, STRANGER)
    with closing(ReadOnlyRamdisk(shared / "eckpt", RUN_ID, JOB)) as reader:
        assert reader.inventory().tensors == ()


def test_clean_by_root_removes_another_users_run(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_user(JOB, shared, "open") == "[7] 0o700"
    assert (
        eckpt_here("doctor", "--clean", "--local-dir", str(shared), "--older-than", "0", "--yes")
        == 0
    )
    assert "removed" in capsys.readouterr().out
    assert not (shared / RUN_ID).exists()


@pytest.mark.parametrize("lock", ["readable", "link", "folder"])
def test_clean_names_a_lock_that_it_cannot_use_and_goes_on(shared: Path, lock: str) -> None:
    assert as_user(STRANGER, shared, "open") == "[7] 0o700"
    theirs = (shared / RUN_ID).rename(shared / "a-strangers")
    for path in (theirs, theirs / "process_00000"):
        path.chmod(0o755)
    path = theirs / "process_00000" / "owner.lock"
    path.chmod(0o644)
    if lock != "readable":
        path.unlink()
        path.symlink_to("host_state") if lock == "link" else path.mkdir()
    assert as_user(JOB, shared, "open") == "[7] 0o700"
    said = as_user(JOB, shared, "clean").splitlines()
    strangers, own, status = sorted(said)
    assert strangers.startswith("a-strangers  ")
    assert "stays: owner.lock: " in strangers
    assert own.startswith(f"{RUN_ID}  ")
    assert "removed: process_00000" in own
    assert status == "status 0"
    assert theirs.exists()
    assert not (shared / RUN_ID).exists()


def test_clean_by_root_leaves_no_lock_of_root(shared: Path) -> None:
    """In a directory that stays, for what its user has put there."""
    assert as_user(JOB, shared, "open") == "[7] 0o700"
    place = shared / RUN_ID / "process_00000"
    (place / "reader.lock").unlink()
    (place / "notes").write_text("of the user")
    give(shared / RUN_ID, JOB)
    eckpt_here("doctor", "--clean", "--local-dir", str(shared), "--older-than", "0", "--yes")
    assert {path.lstat().st_uid for path in place.iterdir()} == {JOB}
    assert as_user(JOB, shared, "open").endswith(" 0o700")


def test_lock_of_root_is_replaced_at_the_next_start(shared: Path) -> None:
    """As an earlier version left it."""
    assert as_user(JOB, shared, "open") == "[7] 0o700"
    lock = shared / RUN_ID / "process_00000" / "reader.lock"
    os.chown(lock, 0, 0)
    assert as_user(JOB, shared, "open").endswith(" 0o700")
    assert lock.lstat().st_uid == JOB
    assert not (shared / RUN_ID / "process_00000.1").exists()


def test_lock_that_cannot_be_replaced_is_named(shared: Path) -> None:
    """Another user's process may have it locked."""
    assert as_user(JOB, shared, "open") == "[7] 0o700"
    lock = shared / RUN_ID / "process_00000" / "owner.lock"
    os.chown(lock, 0, 0)
    told = as_user(JOB, shared, "open")
    assert told.startswith(f"claim {lock}: it is not a file that this user may write")
    assert told.endswith(f"if no process has {lock.parent}: rm -r {lock}")
    give(shared / RUN_ID, 0)
    os.chown(lock, JOB, JOB)
    with pytest.raises(LocalTierError, match=f"claim {lock}: it is not a file that this user may"):
        open_tier(shared)


def test_lock_folder_of_root_is_moved_aside(shared: Path) -> None:
    assert as_user(JOB, shared, "open") == "[7] 0o700"
    lock = shared / RUN_ID / "process_00000" / "reader.lock"
    lock.unlink()
    lock.mkdir()
    assert as_user(JOB, shared, "open").endswith(" 0o700")
    assert lock.is_file()
    assert not (shared / RUN_ID / "process_00000.1").exists()


def test_serve_by_root_makes_no_directory(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(generate_secret())
    secret.chmod(0o600)
    words = ["--secret-file", str(secret), "--drain-to", str(tmp_path / "dir")]
    words += ["--drain-after", "5", "--run-id", RUN_ID, "--local-dir", str(shared / "none")]
    assert eckpt_here("serve", *words) != 0
    told = capsys.readouterr().err
    assert f"serve {shared / 'none'}: not a directory; " in told
    assert f"as the trainer's user: mkdir -m 0700 {shared / 'none'}" in told
    assert not (shared / "none").exists()


def test_clean_by_root_removes_a_run_without_a_readers_lock(shared: Path) -> None:
    assert as_user(JOB, shared, "open") == "[7] 0o700"
    (shared / RUN_ID / "process_00000" / "reader.lock").unlink()
    eckpt_here("doctor", "--clean", "--local-dir", str(shared), "--older-than", "0", "--yes")
    assert not (shared / RUN_ID).exists()


def test_served_run_of_another_user_is_not_freed(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root could, but this option is for the run's own user."""
    assert as_user(JOB, shared, "open") == "[7] 0o700"
    words = ["doctor", "--clean", "--served", "--local-dir", str(shared), "--run-id", RUN_ID]
    words += ["--peers", "none.invalid:7411", "--older-than", "0", "--yes"]
    assert eckpt_here(*words) == 1
    assert f"belongs to user {JOB}" in capsys.readouterr().out
    assert (shared / RUN_ID / "process_00000").is_dir()


def test_clean_follows_no_link_to_another_users_run(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped by its owner between the look and the removal."""
    tier = open_tier(shared / "victim")
    complete_save(tier, 1)
    tier.close()
    assert as_user(STRANGER, shared, "open") == "[7] 0o700"
    looked_at = [run for run in left_runs(shared) if run.run_id == RUN_ID]
    (shared / RUN_ID).rename(shared / "away")
    (shared / RUN_ID).symlink_to(shared / "victim" / RUN_ID)
    monkeypatch.setattr("emergency_ckpt.tools.cli.doctor.clean.left_runs", lambda _: looked_at)
    eckpt_here("doctor", "--clean", "--local-dir", str(shared), "--older-than", "0", "--yes")
    with closing(open_tier(shared / "victim")) as again:
        assert held_steps(again) == [1]


def test_room_is_not_made_of_another_users_run(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root could, and what the kernel refuses hides nothing of this user's own."""
    as_user(STRANGER, shared, "open")
    (shared / RUN_ID).rename(shared / "a-strangers")
    own = open_tier(shared, run_id="z-own")
    own.close()
    for directory in (shared / "a-strangers" / "process_00000", own.path):
        make_old(directory, 10 * 86400.0)
    tier = open_tier(shared)
    gone = shared / "z-own"
    free_bytes = files.free_bytes
    monkeypatch.setattr(files, "free_bytes", lambda fd: 0 if gone.exists() else free_bytes(fd))
    tier.reserve(1 << 16)
    assert (shared / "a-strangers").exists()
    assert not gone.exists()
    monkeypatch.setattr(files, "free_bytes", lambda _: 0)
    with pytest.raises(RamdiskFull):
        tier.reserve(1 << 20)
    assert (shared / "a-strangers").exists()
