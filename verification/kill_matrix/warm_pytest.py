"""Run pytest in forks of this process, which has imported what all tests import but the product.

It reads orders as lines of JSON from its standard input: ``arguments`` of pytest, ``in_process``
(a defect of ``simulation/mutants.py``, or nothing), ``environment``, ``log`` (a file for all
output) and ``limit_s``. For each it prints a line of JSON: ``status`` (none where the limit ended
it), ``failed`` (tests) and ``cpu_s``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import entered_hook
import google.cloud.storage  # noqa: F401
import hypothesis
import jax
import jax.experimental.multihost_utils
import numpy as np  # noqa: F401
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401
import pytest
import tensorstore  # noqa: F401


class _Notes:
    """Puts a defect back once all test modules are imported, and notes which tests fail."""

    def __init__(self, in_process: str, answer: Path) -> None:
        self._in_process = in_process
        self._answer = answer

    def pytest_collection_finish(self) -> None:
        """Hook of pytest."""
        if self._in_process:
            place = str(Path.cwd() / "verification" / "simulation")
            sys.path.insert(0, place)
            from mutants import MUTANTS  # noqa: PLC0415

            sys.path.remove(place)
            MUTANTS[self._in_process].put_back()

    def _add(self, name: str) -> None:
        with self._answer.open("a") as file:
            file.write(f"{name}\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Hook of pytest."""
        file = nodeid.partition("::")[0]
        if "KILL_MATRIX_ENTERED" in os.environ and file != os.environ.get("KILL_MATRIX_FILE"):
            entered_hook.of_file(file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Hook of pytest."""
        if report.failed:
            self._add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Hook of pytest."""
        if report.failed:
            self._add(report.nodeid)


def _child(order: dict[str, Any], answer: Path) -> None:
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.update(order["environment"])
    if "KILL_MATRIX_ENTERED" in os.environ:
        entered_hook.start()
        # A traced example costs several times as much, and most functions are entered early.
        most: Any = hypothesis.settings.max_examples
        fewer = property(lambda each: min(20, most.fget(each)))
        type.__setattr__(hypothesis.settings, "max_examples", fewer)
    status = pytest.main(order["arguments"], plugins=[_Notes(order["in_process"], answer)])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)  # exit functions end the servers that tests have started


def _run(order: dict[str, Any]) -> dict[str, Any]:
    answer = Path(f"{order['log']}.failed")
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(order, answer)
    end_s = time.monotonic() + order["limit_s"]
    status = None
    while True:
        pid, raw, usage = os.wait4(child, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(raw)
            break
        if time.monotonic() > end_s:
            os.killpg(child, signal.SIGKILL)
            _, _, usage = os.wait4(child, 0)
            break
        time.sleep(0.05)
    failed = answer.read_text().split("\n")[:-1] if answer.exists() else []
    return {"status": status, "failed": failed, "cpu_s": usage.ru_utime + usage.ru_stime}


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
