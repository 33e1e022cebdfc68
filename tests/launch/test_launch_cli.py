"""The `eckpt` command and `eckpt launch`."""

from __future__ import annotations

import argparse
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from launch_support import MakeSpec
from looks import add_command, eckpt_here
from places import JOBS
from programs import started

from emergency_ckpt.errors import ConfigError, TransferError
from examples.faults.__main__ import main as with_faults


def install(monkeypatch: pytest.MonkeyPatch, run: object, *, takes_command: bool = False) -> None:
    """Add the subcommand `toy` with one option."""
    module = ModuleType("toy_command")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=1)

    module.add_arguments = add_arguments  # type: ignore[attr-defined]
    module.EXAMPLE = "eckpt toy --size 2"  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_command", module)
    add_command(monkeypatch, "toy_command", takes_command=takes_command)


def raising(error: Exception) -> object:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_help_names_every_command_without_importing_any(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, lambda args: 0)
    monkeypatch.delitem(sys.modules, "toy_command")
    with pytest.raises(SystemExit) as caught:
        eckpt_here("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("launch", "serve", "drain", "doctor", "toy"))


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert eckpt_here() == 2
    assert "launch" in capsys.readouterr().err


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        eckpt_here("lunch")
    assert caught.value.code == 2
    assert "lunch" in capsys.readouterr().err


def test_options_and_exit_code_reach_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda args: args.size)
    assert eckpt_here("toy", "--size", "41") == 41


def test_everything_after_the_dashes_is_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[list[str]] = []
    install(monkeypatch, lambda args: programs.append(args.program) or 0, takes_command=True)
    assert eckpt_here("toy", "--size=1", "--", "python", "--size", "x", "--", "-y") == 0
    assert eckpt_here("toy") == 0
    assert programs == [["python", "--size", "x", "--", "-y"], []]


def test_command_that_takes_no_program_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, lambda args: 0)
    with pytest.raises(SystemExit):
        eckpt_here("toy", "--", "python")
    assert "takes nothing after --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError(["too small"], target="toy"), 2, "eckpt toy: configure toy: too small"),
        (TransferError("fetch", "shard", "refused"), 1, "eckpt toy: fetch shard: refused"),
        (ModuleNotFoundError(name="optax"), 2, "'optax', which is not installed; pip install"),
        (ModuleNotFoundError(name="emergency_ckpt._native"), 2, "lacks emergency_ckpt._native"),
    ],
)
def test_errors_are_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    message: str,
) -> None:
    install(monkeypatch, raising(error))
    assert eckpt_here("toy") == code
    assert message in capsys.readouterr().err


def test_command_whose_module_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(monkeypatch, "absent_package.toy")
    assert eckpt_here("toy") == 2
    assert "pip install 'emergency-ckpt'" in capsys.readouterr().err


def launch(make_spec: MakeSpec, program: str, *options: str) -> tuple[int, Path, Path]:
    spec = make_spec(program)
    arguments = ["launch", "--slices=2", "--hosts-per-slice=1", "--grace-s=0.2", "--timeout-s=120"]
    arguments += [f"--local-root={spec.local_root}", f"--log-dir={spec.log_dir}", *options]
    command = [*arguments, "--", *map(str, spec.command)]
    code = with_faults(command[1:]) if "--fault" in options else eckpt_here(*command)
    return code, spec.local_root, spec.log_path(1, 0)


@pytest.mark.process  # by the name of a command
def test_launch_recovers_from_a_fault(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    program = "train(30)\nif env.restart_count == 0: time.sleep(600)"
    code, root, second_log = launch(make_spec, program, "--fault", "step=10 kill=slice:1")
    assert code == 0
    assert second_log.exists()
    assert not root.exists()
    shown = capfd.readouterr()
    assert "[1.1] life 1 process 1" in shown.out
    assert "fault.fired" in shown.err


@pytest.mark.process
def test_launch_gives_the_failing_exit_code_and_keeps_ram(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    code, root, _ = launch(
        make_spec, "print('bad luck'); sys.exit(5)", "--max-restarts=0", "--quiet"
    )
    assert code == 5
    assert root.exists()
    shown = capfd.readouterr()
    assert "bad luck" not in shown.out
    assert "bad luck" in shown.err
    assert f"ramdisks are kept in {root}" in shown.err


@pytest.mark.process  # by the name of a command
def test_launch_makes_a_named_log_directory_for_its_user_alone(tmp_path: Path) -> None:
    logs = tmp_path / "run7" / "logs"
    places = (f"--log-dir={logs}", f"--local-root={tmp_path}/ram")
    assert eckpt_here("launch", "--hosts-per-slice=1", *places, "--", "true") == 0
    assert (logs / "events").exists()
    assert stat.S_IMODE(logs.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slices=2"], "no command was given"),
        (["--", "no-such-program-here"], "was not found"),
    ],
)
def test_launch_refuses_bad_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    options = [f"--log-dir={tmp_path}/logs", f"--local-root={tmp_path}/ram"]
    assert eckpt_here("launch", *options, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "ram").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("step=x kill=all", "fault 'step=x kill=all': step=x"),
        ("step=1 kill=slice:9", "no slice 9, there are 2"),
    ],
)
def test_bad_faults_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str, message: str
) -> None:
    options = [f"--log-dir={tmp_path}/logs", f"--local-root={tmp_path}/ram"]
    assert with_faults([*options, "--fault", fault, "--", "true"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "ram").exists()


def test_output_that_nobody_reads_does_not_end_the_job(tmp_path: Path) -> None:
    """As in ``eckpt launch ... | head``: the reader leaves after the first line, as intended."""
    program = f"""
import os, pathlib, sys, time
for line in range(30):
    print(line, flush=True)
    time.sleep(0.05)
pathlib.Path({str(tmp_path)!r}, f"done_{{os.getpid()}}").touch()
"""
    words = (
        "launch",
        "--slices",
        2,
        "--hosts-per-slice",
        1,
        "--local-root",
        tmp_path / "ram",
        "--",
    )
    eckpt = (JOBS / "eckpt_program.py", *words, sys.executable, "-c", program)
    with started(*eckpt, stderr=subprocess.PIPE) as launcher:
        launcher.line()
        launcher.stdout.close()
        assert launcher.wait(120.0) == 0
        assert launcher.stderr is not None
        assert "Broken pipe" not in launcher.stderr.read()
    assert len(list(tmp_path.glob("done_*"))) == 2


@pytest.mark.process
def test_launch_without_steps_says_how_to_report_them(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    fault = ("--fault", "step=10 kill=slice:1")
    assert launch(make_spec, "print('trained')", *fault)[0] == 0
    assert "no process has reported a step" in capfd.readouterr().err
    assert launch(make_spec, "sys.exit(5)", "--max-restarts=1")[0] == 5
    assert "no process has reported a step" in capfd.readouterr().err
