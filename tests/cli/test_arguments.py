"""Arguments that would be taken for others are refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from looks import USAGE_EXIT_CODE, eckpt_here

from emergency_ckpt.tools.cli.main import parse


@pytest.mark.parametrize("port", ["-1", "65536", "99999", "80.5", "http"])
def test_port_that_is_none(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        eckpt_here("serve", "--local-dir", "/dev/shm", "--run-id", "r", "--port", port)
    assert ended.value.code == USAGE_EXIT_CODE
    assert "argument --port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        *[("launch", "--timeout-s", value) for value in ("nan", "inf", "0", "-1", "soon")],
        *[("plan", "--state-gib", value) for value in ("nan", "inf", "0", "-1", "1e-12", "big")],
        *[("plan", "--host-state-mib", value) for value in ("nan", "inf", "-1")],
        *[("doctor", "--state-gib", value) for value in ("nan", "0")],
        *[("doctor", "--slices", value) for value in ("0", "1.5")],
    ],
)
def test_number_that_is_none(
    command: str, name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        eckpt_here(command, f"{name}={value}")
    assert ended.value.code == USAGE_EXIT_CODE
    assert f"argument {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("serve", "--peers"),
        ("serve", "--trainers"),
        ("drain", "--peers"),
        ("ls", "--peers"),
        ("doctor", "--peers"),
    ],
)
@pytest.mark.parametrize("address", ["train", "train:", "a..b:80", "none@train:80"])
def test_address_that_is_none(
    command: str, name: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        eckpt_here(command, name, f"127.0.0.1:7411,{address}")
    assert ended.value.code == USAGE_EXIT_CODE
    assert f"argument {name}: '{address}' is not HOST:PORT" in capsys.readouterr().err


def test_addresses_may_have_an_identity() -> None:
    addresses = ("[::1]:7411", f"{'0f' * 16}@train:7411")
    args = parse(["drain", "--peers", ",".join(addresses)])
    assert args is not None
    assert args.peers == addresses


def test_job_that_is_refused_leaves_no_directory_for_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert eckpt_here("launch", "--slices", "0", "--", "true") == USAGE_EXIT_CODE
    assert "slices must be at least 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_made_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "below")
    assert eckpt_here("launch", "--local-root", place, "--", "true") == 1
    error = capsys.readouterr().err
    assert "eckpt launch: " in error
    assert place in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "no directory for logs"
