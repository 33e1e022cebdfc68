"""A fork stands for a program of its own: environment, arguments, output, status, and its end."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common import warm

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    modules = tmp_path_factory.mktemp("modules")
    (modules / "imported_once.py").write_text("import os\nPID = os.getpid()\n")
    with warm.started(("imported_once",), (modules,)) as address:
        yield address


def _script(directory: Path, text: str) -> Path:
    script = directory / "script.py"
    script.write_text(text)
    return script


def _run(
    address: Path, script: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*warm.command(address, script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
        timeout=TIMEOUT_S,
        check=False,
    )


def test_fork_has_its_own_environment_arguments_and_status(address: Path, tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import atexit, os, sys, imported_once\n"
        "assert imported_once.PID != os.getpid()\n"
        "atexit.register(print, 'at exit')\n"
        "print(os.environ['WORD'], sys.argv[1:], __name__)\n"
        "sys.exit(int(sys.argv[1]))\n",
    )
    for status in (0, 3):
        done = _run(address, script, str(status), WORD=f"word {status}")
        assert done.returncode == status
        assert done.stdout.splitlines() == [f"word {status} ['{status}'] __main__", "at exit"]


def test_what_nobody_caught_is_shown(address: Path, tmp_path: Path) -> None:
    done = _run(address, _script(tmp_path, "raise KeyError('nobody')"))
    assert done.returncode == 1
    assert "KeyError: 'nobody'" in done.stdout


def test_fork_that_dies_is_a_failure(address: Path, tmp_path: Path) -> None:
    script = _script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert _run(address, script).returncode == 1


def test_fork_goes_with_the_process_that_stands_for_it(address: Path, tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()}\\n')\n"
        f"time.sleep({10 * TIMEOUT_S})\n",
    )
    noted = tmp_path / "pid"
    deadline_s = time.monotonic() + TIMEOUT_S
    with subprocess.Popen([*warm.command(address, script), str(noted)]) as stand_in:
        while not (noted.exists() and noted.read_text().endswith("\n")):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        stand_in.kill()
    while Path(f"/proc/{int(noted.read_text())}").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_it_says_when_it_cannot_import(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError), warm.started(("no_such_module",), (tmp_path,)):
        pass
