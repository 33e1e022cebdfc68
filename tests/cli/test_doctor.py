"""``eckpt doctor``, as an init container runs it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_link import FakeMachine
from looks import USAGE_EXIT_CODE, eckpt_here
from programs import eckpt_json
from tiers_support import RUN_ID, complete_save, document, open_tier, save_id
from trees import tree_of
from world import small_tmpfs

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.ram.host_memory import Mount
from emergency_ckpt.run_secret import SECRET_VARIABLE, generate_secret
from emergency_ckpt.state import link
from emergency_ckpt.storage import StorageDirectory, probe_storage
from emergency_ckpt.tools.cli.doctor import show
from emergency_ckpt.tools.cli.doctor.checks import Finding, check_devices, check_pages
from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk
from emergency_ckpt.transfer import TransferServer

SECRET = generate_secret()


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def ramdisk() -> Iterator[Path]:
    path = Path(f"/dev/shm/eckpt-doctor-{os.getpid()}")
    path.mkdir(mode=0o700)
    yield path
    subprocess.run(["rm", "-r", str(path)], check=True)


def doctor(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    """Return the exit status, and the checks by name."""
    code = eckpt_here("doctor", "--json", *words)
    found = json.loads(capsys.readouterr().out)
    return code, {check["check"]: check for check in found["checks"]}


def test_finding_is_one_line_whatever_a_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    show([Finding("copies", "warning", "of a\x1b[2J\nok", "ask b\x07")])
    out = capsys.readouterr().out
    assert out.splitlines() == [
        r"warning  copies     of a\x1b[2J\nok",
        r"                    ask b\x07",
        "1 warning",
    ]


def test_doctor_good_host_exits_with_0(
    capsys: pytest.CaptureFixture[str], ramdisk: Path, tmp_path: Path, secret_file: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    code, checks = doctor(
        capsys,
        *("--local-dir", ramdisk, "--dir", store, "--secret-file", secret_file),
        *("--state-gib", 0.001),
    )
    assert code == 0
    assert {name for name, check in checks.items() if check["status"] == "failure"} == set()
    assert checks["ramdisk"]["text"] == f"{ramdisk} lies on tmpfs, mounted at /dev/shm"
    assert checks["engine"]["text"].startswith("CRC32C by ")
    assert [path.name for path in (store / "host_state").iterdir()] == []


def test_doctor_ramdisk_and_secret_stay_as_they_are(
    capsys: pytest.CaptureFixture[str], ramdisk: Path, secret_file: Path
) -> None:
    (ramdisk / "run" / "process_00000").mkdir(parents=True)
    (ramdisk / "run" / "process_00000" / "slot_0.bin").write_bytes(bytes(5000))
    before = tree_of(ramdisk), tree_of(secret_file.parent)
    doctor(capsys, "--local-dir", ramdisk, "--run-id", "run", "--secret-file", secret_file)
    missing = ramdisk / "missing" / "eckpt"
    _, checks = doctor(capsys, "--local-dir", missing)
    assert checks["owner"]["text"] == f"{missing} is missing; a start makes it in {ramdisk}"
    assert (tree_of(ramdisk), tree_of(secret_file.parent)) == before


def test_doctor_ramdisk_too_small_says_by_how_much(
    capsys: pytest.CaptureFixture[str], ramdisk: Path
) -> None:
    code, checks = doctor(capsys, "--local-dir", ramdisk, "--state-gib", 1e6)
    assert code == 1
    assert checks["room"]["status"] == "failure"
    assert checks["room"]["mend"].startswith("Enlarge the ramdisk by ")
    assert checks["memory"]["status"] == "failure"


def test_doctor_room_counts_slots_copies_and_processes(
    capsys: pytest.CaptureFixture[str], ramdisk: Path
) -> None:
    size = ("--state-gib", 8, "--slices", 4, "--hosts-per-slice", 4, "--processes", 2)
    options = ("--placement", "striped(2)", "--local-keep-last-n", 2)
    _, checks = doctor(capsys, "--local-dir", ramdisk, *size, *options)
    per_process = 3 * (8 << 30) // 4 // 2 + (1 << 20)
    assert checks["room"]["measured"]["needed_bytes"] == 2 * per_process
    assert checks["room"]["measured"]["spare_bytes"] == 2 * (8 << 30) // 4 // 2
    host = ("--host-state-mib", 3)
    _, checks = doctor(capsys, "--local-dir", ramdisk, *size, *options, *host)
    with_copies = per_process + 3 * 4 * (3 << 20)
    assert checks["room"]["measured"]["needed_bytes"] == 2 * with_copies


def test_doctor_room_without_a_spare_slot_is_a_warning(
    capsys: pytest.CaptureFixture[str], ramdisk: Path
) -> None:
    with small_tmpfs(ramdisk / "small", 20 << 20):
        for size_mib, status in ((4, "ok"), (8, "warning"), (12, "failure")):
            size = ("--state-gib", size_mib / 1024, "--slices", 1)
            _, checks = doctor(capsys, "--local-dir", ramdisk / "small", *size)
            assert checks["room"]["status"] == status
        _, checks = doctor(
            capsys, "--local-dir", ramdisk / "small", *size[:1], 4 / 1024, "--host-state-mib", 5
        )
        assert checks["room"]["status"] == "failure"


def test_doctor_disk_as_local_dir_is_a_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, checks = doctor(capsys, "--local-dir", tmp_path)
    assert code == 1
    assert "not on tmpfs" in checks["ramdisk"]["text"]


def test_doctor_open_local_dir_names_the_command(
    capsys: pytest.CaptureFixture[str], ramdisk: Path
) -> None:
    ramdisk.chmod(0o777)
    code, checks = doctor(capsys, "--local-dir", ramdisk)
    assert code == 1
    assert f"Chmod go-w {ramdisk}" in checks["owner"]["mend"]


def test_doctor_secret_open_to_others_is_a_failure(
    capsys: pytest.CaptureFixture[str], secret_file: Path
) -> None:
    secret_file.chmod(0o644)
    code, checks = doctor(capsys, "--secret-file", secret_file)
    assert code == 1
    assert "open to others" in checks["secret"]["text"]
    assert SECRET.decode() not in json.dumps(checks)


def test_doctor_warnings_count_with_strict(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(capsys)[0] == 0  # no secret is a warning
    assert doctor(capsys, "--strict")[0] == 1


def test_doctor_blocked_storage_is_a_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "host_state").write_text("in the way")
    code, checks = doctor(capsys, "--dir", tmp_path)
    assert code == 1
    assert "host_state" in checks["storage"]["text"]


@pytest.mark.parametrize("makes", ["", "folder", "link"])
def test_doctor_does_not_make_a_directory_that_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, makes: str
) -> None:
    """A mount that failed looks like this; a directory in its place would hide that."""
    directory = tmp_path / "run7"
    if makes == "folder":
        directory.mkdir()
    elif makes == "link":
        (tmp_path / "elsewhere").mkdir()
        directory.symlink_to(tmp_path / "elsewhere")
    code, checks = doctor(capsys, "--dir", directory)
    assert (code, checks["storage"]["status"]) == (0, "ok" if makes else "warning")
    assert directory.exists() == bool(makes)
    if not makes:
        assert "mount" in checks["storage"]["mend"]
        assert doctor(capsys, "--dir", directory, "--strict")[0] == 1


@pytest.fixture
def served(ramdisk: Path) -> Iterator[str]:
    holdings = ReadOnlyRamdisk(ramdisk, "run")
    with TransferServer(holdings, run_id="run", secret=SECRET) as server:
        yield server.contact
    holdings.close()


def test_doctor_peer_with_the_secret_is_greeted(
    capsys: pytest.CaptureFixture[str], served: str, secret_file: Path
) -> None:
    words = ("--peers", served, "--run-id", "run", "--secret-file", secret_file)
    code, checks = doctor(capsys, *words)
    assert code == 0
    assert "reached and greeted" in checks["peer"]["text"]


def test_doctor_peer_without_a_run_id_is_reached_alone(
    capsys: pytest.CaptureFixture[str], served: str, secret_file: Path
) -> None:
    code, checks = doctor(capsys, "--peers", served, "--secret-file", secret_file)
    assert code == 0
    assert checks["peer"]["text"].endswith("reached; not greeted (no secret or no --run-id)")


def test_doctor_peer_with_another_secret_is_a_failure(
    capsys: pytest.CaptureFixture[str], served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, generate_secret().decode())
    code, checks = doctor(capsys, "--peers", served, "--run-id", "run")
    assert code == 1
    assert "same secret" in checks["peer"]["mend"]


@pytest.mark.dear
def test_doctor_absent_and_silent_peers_are_failures(
    capsys: pytest.CaptureFixture[str], secret_file: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in (silent, unused)]
        for address in [*addresses, "none.invalid:7411"]:
            words = ("--peers", address, "--run-id", "run", "--secret-file", secret_file)
            code, checks = doctor(capsys, *words, "--timeout", 0.5)
            assert code == 1
            assert checks["peer"]["text"].startswith(f"{address} cannot be reached")


def run_on_bucket(directory: str) -> tuple[int, dict[str, Any]]:
    code, found = eckpt_json("doctor", "--dir", directory, "--timeout", 20)
    return code, {check["check"]: check for check in found["checks"]}


@pytest.mark.usefixtures("gcs")
def test_doctor_bucket_is_tried_and_left_as_it_was() -> None:
    code, checks = run_on_bucket("gs://bucket/run")
    assert code == 0
    assert "generation preconditions are honoured" in checks["storage"]["text"]
    assert checks["state"]["text"].startswith("gs://bucket/run has no step")
    code, checks = run_on_bucket("gs://absent/run")
    assert code == 1
    assert "bucket" in checks["storage"]["mend"]


def test_doctor_import_starts_no_accelerator_backend(tmp_path: Path) -> None:
    program = (
        "import sys; from emergency_ckpt.tools.cli.main import main;"
        "code = main(['doctor', '--json', '--dir', sys.argv[1], '--state-gib', '1']);"
        "sys.exit(code or 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("huge", "kernel", "status", "told"),
    [
        ("within_size", "always within_size advise [never] deny force", "ok", "huge=within_size"),
        ("within_size", "always within_size advise never [deny] force", "warning", "denies"),
        ("", "always within_size advise never deny [force]", "ok", "forces"),
        ("never", "always within_size advise never deny [force]", "ok", "forces"),
        ("", "[always] within_size advise never deny force", "warning", "pages of 4 KiB"),
        ("advise", "always within_size advise [never] deny force", "warning", "pages of 4 KiB"),
        ("", "", "warning", "pages of 4 KiB"),
    ],
)
def test_doctor_pages_follow_the_kernel_before_the_mount(
    tmp_path: Path, huge: str, kernel: str, status: str, told: str
) -> None:
    chosen = tmp_path / "shmem_enabled"
    if kernel:
        chosen.write_text(f"{kernel}\n")
    options = ("rw", *([f"huge={huge}"] if huge else []))
    found = check_pages(Mount("tmpfs", "/ram", options), chosen)
    assert found.status == status
    assert told in found.text


class _Forgetful(StorageDirectory):
    """Storage that ignores the precondition that a file is new, as some stores do."""

    def put_first(self, below: str, data: bytes, deadline_s: float | None = None) -> bool:
        (self.path / below).write_bytes(data)
        return True


def test_probe_storage_without_preconditions_is_an_error(tmp_path: Path) -> None:
    deadline_s = time.monotonic() + 30
    with pytest.raises(PersistentTierError, match="created although it existed"):
        probe_storage(_Forgetful(str(tmp_path), 30), "1-2", deadline_s, conditions=True)
    assert list((tmp_path / "host_state").iterdir()) == []


@pytest.mark.parametrize(
    ("tasks", "gpus", "ids", "is_said"),
    [
        ("1(x4)", "8", None, True),
        ("4", "8", None, True),
        ("1(x4)", "8", "0,1,2,3,4,5,6,7", False),
        ("8(x4)", "8", None, False),
        ("4(x2),3", "8", None, False),  # not known for this node
        ("1", "eight", None, False),
        ("", "8", None, False),
    ],
)
def test_doctor_names_gpus_without_a_task(
    tasks: str, gpus: str, ids: str | None, is_said: bool
) -> None:
    environ = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_GPUS_ON_NODE": gpus}
    environ |= {} if ids is None else {"JAX_LOCAL_DEVICE_IDS": ids}
    found = list(check_devices(environ))
    assert len(found) == is_said
    assert all("--ntasks-per-node=8" in each.mend for each in found)


def test_doctor_link_is_looked_at_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = doctor(capsys, "--link")
    assert code == 0
    assert checks["link"]["status"] == "ok"
    assert "'views'" in checks["link"]["text"]
    assert "link" not in doctor(capsys)[1]


def test_doctor_warns_of_a_link_without_a_direct_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine()
    machine.limit_bytes = 0
    found = machine.link()
    monkeypatch.setattr(link, "find_link", lambda: found)
    code, checks = doctor(capsys, "--link")
    assert code == 0
    assert checks["link"]["status"] == "warning"
    assert "'pageable'" in checks["link"]["text"]
    assert "GB/s" in checks["link"]["text"]
    assert "not mapped: the fake limit is reached" in checks["link"]["text"]
    assert "ulimit -l" in checks["link"]["mend"]


def test_doctor_size_of_the_slots_needs_no_ramdisk(capsys: pytest.CaptureFixture[str]) -> None:
    """As where `--mem` of a batch job is chosen, before there is a host."""
    code, checks = doctor(capsys, "--state-gib", 8, "--hosts-per-slice", 4)
    assert code == 0
    assert checks["slots"]["measured"] == {"slots": 2, "needed_bytes": (4 << 30) + (1 << 20)}


def test_doctor_counts_host_states_as_room_of_their_run(
    capsys: pytest.CaptureFixture[str], ramdisk: Path
) -> None:
    with small_tmpfs(ramdisk / "small", 20 << 20):
        tier = open_tier(ramdisk / "small", run_id=RUN_ID)
        tier.publish_host_state(save_id(1), 0, 4, document(1, value="x" * (4 << 20)))
        complete_save(tier, 1)
        size = ("--state-gib", 5 / 1024, "--slices", 1, "--host-state-mib", 4)
        _, checks = doctor(capsys, "--local-dir", ramdisk / "small", "--run-id", RUN_ID, *size)
        assert checks["room"]["status"] != "failure"
        assert checks["room"]["measured"]["held_by_this_run_bytes"] > 4 << 20
        tier.close()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_doctor_local_dir_that_is_no_directory_is_a_failure(
    capsys: pytest.CaptureFixture[str], ramdisk: Path, kind: str
) -> None:
    place = ramdisk / "eckpt"
    place.write_text("") if kind == "file" else place.symlink_to(ramdisk / "missing")
    code, checks = doctor(capsys, "--local-dir", place)
    assert code == 1
    assert checks["owner"]["text"] == f"{place}: it is no directory"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--dir", ""], "dir '' is not an absolute path"),
        (["--dir", "store"], "dir 'store' is not an absolute path"),
        (["--local-dir", "eckpt"], "local_dir 'eckpt' is not an absolute path"),
        (["--dir", "gs://bucket/a#b"], "Orbax would store arrays elsewhere"),
    ],
)
def test_doctor_refuses_a_place_that_a_start_refuses(
    capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    assert eckpt_here("doctor", *words) == USAGE_EXIT_CODE
    assert problem in capsys.readouterr().err


def test_doctor_devices_that_jax_cannot_take_are_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> object:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(link, "find_link", refused)
    code, checks = doctor(capsys, "--link")
    assert code == 1
    assert "JAX cannot take the devices: Unable to" in checks["link"]["text"]
    assert checks["engine"]["status"] == "ok"


def test_doctor_looks_past_a_closed_directory(
    capsys: pytest.CaptureFixture[str], ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is below it cannot be told from what is missing, and another finding has the hint."""
    closed = ramdisk / "closed"
    stat = os.stat

    def refused(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    closed.mkdir()
    monkeypatch.setattr(os, "stat", refused)
    _, checks = doctor(capsys, "--local-dir", closed / "eckpt")
    assert {"owner", "room", "memory"} <= checks.keys()


def test_doctor_takes_a_file_url_as_a_start_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, checks = doctor(capsys, "--dir", f"file://{tmp_path}")
    assert code == 0
    assert checks["storage"]["status"] == "ok"
