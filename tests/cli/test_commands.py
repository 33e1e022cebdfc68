"""The commands of ``eckpt``: the example of each help, options that clash, ends."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from looks import USAGE_EXIT_CODE, eckpt_here
from places import ROOT

from emergency_ckpt.tools.cli.main import COMMANDS, parse


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        eckpt_here(*words, "--help")
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [[name] for name in COMMANDS])
def test_help_has_an_example_that_parses(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, example = help_of(capsys, *words).partition("example:\n")
    program, *arguments = shlex.split(example)
    assert program == "eckpt"
    args = parse(arguments)
    assert args is not None
    assert args.command == words[0]


def test_examples_of_plan_are_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = help_of(capsys, "plan")
    for title in ("with --gke:\n", "\nexample:\n"):
        example = text.partition(title)[2].partition("\n\n")[0].replace("\\\n", " ")
        assert eckpt_here(*shlex.split(example)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["ls", "5", "--check"], "exclude each other"),
        (["ls", "--read-data"], "--read-data needs --check"),
        (["ls", "--peers", "a:1"], "--peers needs --survives"),
        (["ls", "--tier", "local"], "need STEP"),
        (["drain"], "--dir and --local-dir are needed"),
        (["doctor", "--yes"], "--yes needs --clean"),
        (["doctor", "--clean", "--peers", "a:1"], "--peers with --clean needs --served"),
        (["ls", "--explain", "log", "--run-id", "r"], "--explain takes no --local-dir, no --dir"),
        (["serve", "--run-id", "r", "--trainers", "a:1"], "need --drain-to"),
    ],
)
def test_options_that_clash_are_named(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eckpt_here(*words, "--local-dir", str(tmp_path)) == USAGE_EXIT_CODE
    assert problem in capsys.readouterr().err


def test_interrupted_command_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The way of other errors also ends the process where storage has not answered a call."""

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("emergency_ckpt.tools.cli.ls.run", interrupted)
    assert eckpt_here("ls") == 130
    assert capsys.readouterr().err == ""


def test_output_that_is_closed_is_no_file_of_the_command(tmp_path: Path) -> None:
    """A descriptor that the shell closed would be that of the next file."""
    words = [sys.executable, "-m", "emergency_ckpt.tools.cli.main", "ls", "--json"]
    program = shlex.join([*words, "--local-dir", str(tmp_path)])
    ended = subprocess.run(
        ["sh", "-c", f"exec {program} >&-"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


DOCUMENTS = (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*/README.md"))
_BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```$", re.M | re.S)


def commands_in_documents() -> list[tuple[str, ...]]:
    """The words of each `eckpt` command that a block of a document shows.

    At the start of a line, or after the ``--`` of another program.
    """
    found: list[tuple[str, ...]] = []
    for path in DOCUMENTS:
        for block in _BLOCK.findall(path.read_text()):
            lines = block.replace("\\\n", " ").splitlines()
            for line in lines:
                if command := re.search(r"(?:^|^\$ | -- )eckpt (.*)", line):
                    words = shlex.split(command[1], comments=True)
                    found.append(tuple(words[: words.index("&") if "&" in words else None]))
    return found


def inline_commands() -> list[str]:
    """Each `eckpt` command in the text of a document. Most lack values, and some options."""
    texts = (_BLOCK.sub("", path.read_text()) for path in DOCUMENTS)
    commands = (each for text in texts for each in re.findall(r"`eckpt\s([^`]*)`", text))
    return sorted({" ".join(command.split()) for command in commands})


@pytest.mark.parametrize("text", inline_commands())
def test_commands_in_text_name_options_that_exist(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = text.partition(" -- ")[0]
    words = [word.strip("[]").partition("=")[0] for word in own.split()]
    command = [word for word in words[:2] if word in COMMANDS]
    assert command or words == ["--version"]
    options = {word for word in words if word.startswith("--")}
    taken = set(re.findall(r"--[a-z][a-z-]*", help_of(capsys, *command)))
    assert options <= taken


@pytest.mark.parametrize("words", commands_in_documents(), ids=" ".join)
def test_commands_in_documents_have_arguments_that_are_taken(words: tuple[str, ...]) -> None:
    assert parse(list(words)) is not None


def test_documents_show_commands() -> None:
    """Else the test above has nothing to look at."""
    assert {"launch", "doctor", "drain", "plan"} <= {words[0] for words in commands_in_documents()}
    assert {"ls STEP", "drain", "serve"} <= set(inline_commands())
