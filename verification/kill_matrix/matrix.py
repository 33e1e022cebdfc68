"""Put the defects of the reliability record back, one at a time: which tests notice?

    python verification/kill_matrix/matrix.py [--only NAME ...] [--sample 10 --seed 1] [--whole]
    python verification/kill_matrix/matrix.py --only NAME ... --named
    python verification/kill_matrix/matrix.py --check
    python verification/kill_matrix/matrix.py --table

Each mutant meets the strong part of the suite, up to the first test that fails, and what
survives that meets the tests that the record names. ``--whole``: every file of the suite, past the
first failure. ``--named``: only the tests that the record names, in minutes instead of hours; the
result says so, and counts for no other run. Results are kept in ``results.json``; a run that is
begun again goes on behind them.
Exit status 1 when a mutant of this run survived.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

# ruff: noqa: E402 - these stand beside this file
from defects import ROOT, Mutant, faults, load
from workplace import Workplace

RESULTS = HERE / "results.json"
SIMULATION = "verification/simulation/run.py"


@dataclass(frozen=True)
class Stage:
    """Test files that run together. ``again``: a failure counts only where it goes without it."""

    name: str
    files: tuple[str, ...]
    again: bool = False
    selected: str = ""


STRONG = (
    Stage(
        "in-process",
        (
            "tests/core",
            "tests/ram/test_format.py",
            "tests/transfer/test_transfer_wire.py",
            "tests/fuzz/test_decoders.py",
            "tests/state",
            "tests/cluster/test_coordinators_in_memory.py",
            "tests/storage/test_item_is_orbaxs.py",
            "tests/transfer/test_transfer_authentication.py",
            "tests/transfer/test_transfer_before_proof.py",
            "tests/test_tier_conformance.py",
            "tests/verification/test_format_reader.py",
            "tests/transfer/test_transfer_sessions.py",
        ),
    ),
    Stage("simulation", (SIMULATION,)),
    Stage("faces", ("tests/axlearn", "tests/maxtext", "tests/orbax"), again=True),
    Stage("job: restore", ("tests/system/test_restore.py",), again=True),
    Stage("job: preemption", ("tests/system/test_preemption.py",), True, "test_all_save_one_step"),
    Stage(
        "job: kill points",
        ("tests/system/test_kill_points.py",),
        True,
        "(killed_in_a_save and (staged-ahead-0 or state_published-ahead-0))"
        " or (killed_in_a_restore and planned)",
    ),
    Stage("job: bucket", ("tests/system/test_gcs_job.py",), again=True),
)
_LONGEST_TEST_S = 300
_FIRST_FILES = 4
_FIRST_SEED = "2001"  # from here on the known defects are found within the fewest lives
_ENTERS_ALL = 10**6
_LONGEST_STAGE_S = 1800


def expanded(paths: Iterable[str]) -> list[str]:
    """Return the test files of files and folders, in order."""
    files: list[str] = []
    for path in paths:
        below = sorted((ROOT / path).rglob("test_*.py")) if (ROOT / path).is_dir() else []
        files += [str(each.relative_to(ROOT)) for each in below] or [path]
    return [file for file in files if (ROOT / file).is_file()]


class Matrix:
    """Runs mutants in a workplace, and keeps what came of them."""

    def __init__(
        self, place: Workplace, strong: Sequence[Stage], arguments: argparse.Namespace
    ) -> None:
        self._place = place
        self._strong = strong
        self._out: Path = arguments.out.resolve()
        self._seeds: int = arguments.seeds
        self._most: int | None = arguments.most
        self._whole: bool = arguments.whole
        self._named: bool = arguments.named
        self._any_tree: bool = arguments.any_tree
        self._entered: dict[str, list[str]] = {}
        self._broken: set[str] = set()
        self._cpu_s = 0.0

    # Which functions a test file enters.

    def note_entered(self) -> None:
        """Run the strong part without a defect, and note which functions each file enters.

        A file that enters no changed function cannot see a defect, and is left out. Kept below
        ``out`` for this state of the tree.
        """
        kept = self._out / f"entered-{self._place.state}.json"
        for stage in self._strong:
            if kept.is_file():  # another run may have added to it
                self._entered |= json.loads(kept.read_text())
            files = [file for file in expanded(stage.files) if file not in self._entered]
            if not files:
                continue
            notes = self._out / f"entered-{os.getpid()}.txt"
            notes.unlink(missing_ok=True)
            more = {"KILL_MATRIX_ENTERED": str(notes), "KILL_MATRIX_FILE": ""}
            done = self._run(stage, files, None, more)
            print(f"{stage.name}: {done['cpu_s']:.0f} s of CPU", *done["failed"], flush=True)
            entered: dict[str, set[str]] = {}
            assert notes.is_file(), (self._out / f"pytest-{os.getpid()}.log").read_text()[-2000:]
            for line in notes.read_text().splitlines():
                file, _, function = line.partition("\t")
                entered.setdefault(file, set()).add(function)
            # What runs while modules are imported, or in a stage of one file, is of each file.
            of_all = entered.get("", set())
            broken = {name.partition("::")[0] for name in done["failed"]}
            for file in files:
                if file not in broken:
                    self._entered[file] = sorted(of_all | entered.get(file, set()))
            notes.unlink()
            before = json.loads(kept.read_text()) if kept.is_file() else {}
            kept.write_text(json.dumps(before | self._entered))

    def take_notes(self, file: Path) -> None:
        """Take the notes of an earlier run, of a tree that enters the same functions."""
        self._entered = json.loads(file.read_text())

    def _sees(self, file: str, functions: set[str]) -> bool:
        return file not in self._entered or not functions.isdisjoint(self._entered[file])

    # Runs.

    def _run(
        self, stage: Stage, files: Sequence[str], mutant: Mutant | None, more: dict[str, str]
    ) -> dict[str, Any]:
        in_process = mutant.in_process if mutant else ""
        if files == [SIMULATION]:
            done = self._simulate(in_process, more)
        else:
            selected = ["-k", stage.selected] if stage.selected else []
            first = [] if self._whole or mutant is None else ["-x"]
            limits = [f"--timeout={_LONGEST_TEST_S}", "--hypothesis-seed=0"]
            limits += [f"--deselect={name}" for name in self._broken]
            done = self._place.pytest(
                {
                    "arguments": ["--tb=short", *limits, *first, *selected, *files],
                    "in_process": in_process,
                    "environment": more,
                    "log": str(self._out / f"pytest-{os.getpid()}.log"),
                    "limit_s": _LONGEST_STAGE_S,
                }
            )
        self._cpu_s += done["cpu_s"]
        return done

    def _simulate(self, in_process: str, more: dict[str, str]) -> dict[str, Any]:
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        names = [in_process] if in_process else []
        seeds = ["--first", _FIRST_SEED, "--seeds", str(self._seeds), "--work", *names]
        worker = subprocess.Popen(
            [str(self._place.python), SIMULATION, *seeds],
            cwd=self._place.tree,
            env={**self._place.environment(), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert worker.stdout is not None
        failed: list[str] = []
        ended = False
        for line in worker.stdout:
            told = json.loads(line) if line.startswith("{") else {}
            ended = ended or "cpu_s" in told
            if "seed" in told:
                failed.append(f"{SIMULATION} --seed {told['seed']}: {told['failure'][:120]}")
                os.killpg(worker.pid, signal.SIGKILL)
                break
        worker.wait()
        if not failed and not ended:
            failed.append(f"{SIMULATION}: it ended early")
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = spent.ru_utime + spent.ru_stime - began.ru_utime - began.ru_stime
        return {"status": bool(failed), "failed": failed, "cpu_s": cpu_s}

    def _has_timed_out(self) -> bool:
        log = self._out / f"pytest-{os.getpid()}.log"
        return log.is_file() and "Timeout" in log.read_text(errors="replace")

    def judge(self, mutant: Mutant, kept: dict[str, Any]) -> dict[str, Any]:
        """Return what is known of a mutant: ``kept``, and what had not been run."""
        now = {"digest": mutant.digest, "tree": self._place.state}
        names = ["digest"] if self._any_tree else list(now)
        same = all(kept.get(name) == now[name] for name in names)
        same = same and (self._named or "named_only" not in kept)
        result = kept if same else {**now, "killed": {}, "passed": [], "not_entered": 0}
        if self._named and not same:
            result["named_only"] = True
        functions = mutant.functions(self._place.tree)
        result["not_entered"] = 0
        began_s = self._cpu_s
        strong = [file for stage in self._strong for file in expanded(stage.files)]
        for stage in (*self._strong, *self._rest(mutant, strong)):
            if result["killed"] and not self._whole:
                break
            files = [file for file in expanded(stage.files) if self._sees(file, functions)]
            result["not_entered"] += len(expanded(stage.files)) - len(files)
            files = [f for f in files if f not in result["passed"] and f not in result["killed"]]
            # A defect of this process alone does not reach the processes of a job.
            if mutant.in_process and stage.name.startswith("job"):
                continue
            # Files that enter little else than what was changed first.
            files.sort(key=lambda file: len(self._entered.get(file, ())) or _ENTERS_ALL)
            for part in (files[:_FIRST_FILES], files[_FIRST_FILES : self._most]):
                if part and (self._whole or not result["killed"]):
                    self._meet(stage, part, mutant, result)
        result["cpu_s"] = round(kept.get("cpu_s", 0) * same + self._cpu_s - began_s, 1)
        return result

    def _rest(self, mutant: Mutant, strong: list[str]) -> list[Stage]:
        named = [file for file in mutant.record_tests if file not in strong]
        cheap_first = sorted(expanded(named), key=_is_job)
        stages = [Stage(f"record: {file}", (file,), _is_job(file)) for file in cheap_first]
        if self._whole:
            others = [f for f in expanded(["tests"]) if f not in strong and f not in named]
            stages += [Stage(f"rest: {file}", (file,), _is_job(file)) for file in others]
        return stages

    def _meet(self, stage: Stage, files: list[str], mutant: Mutant, result: dict[str, Any]) -> None:
        while True:
            with self._place.changed(mutant):
                done = self._run(stage, files, mutant, {})
            failed = done["failed"]
            if not failed and done["status"] not in (0, 5):
                failed = [f"{files[0]}: pytest ended with {done['status']}"]
            fails_without = self._fails_without(stage, files, failed, mutant, done["status"])
            if not fails_without:
                break
            result["unsure"] = sorted({*result.get("unsure", ()), *fails_without})
            if fails_without <= self._broken:
                return
            self._broken |= fails_without
        for name in failed:
            file = name.partition("::")[0].partition(" ")[0].partition(":")[0]
            result["killed"].setdefault(file, name.removeprefix(f"{file}::"))
        if not failed:
            result["passed"] = sorted({*result["passed"], *files})

    def _fails_without(
        self, stage: Stage, files: list[str], failed: list[str], mutant: Mutant, status: int | None
    ) -> set[str]:
        """Return which of the ``failed`` tests fail without the defect too.

        Asked where a machine that is busy may be the reason, or where nobody expected it.
        """
        names = [name for name in failed if "::" in name] or files
        is_expected = {name.partition("::")[0] for name in names} <= {*mutant.record_tests}
        # With ``--named`` no run without a defect has come before.
        doubtful = stage.again or self._named or status is None or self._has_timed_out()
        if not failed or files == [SIMULATION] or (is_expected and not doubtful):
            return set()
        return set(self._run(stage, names, None, {})["failed"])


def read_results() -> dict[str, Any]:
    """Return what earlier runs found, by mutant."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def _is_job(file: str) -> bool:
    """Return whether the tests of ``file`` run several processes, on a machine that may be busy."""
    return file.startswith(("tests/system/", "tests/launch/", "tests/deploy/", "tests/demo/"))


def keep_result(name: str, result: dict[str, Any]) -> None:
    """Add a result to the file; several runs may do so at a time."""
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = json.dumps({**read_results(), name: result}, indent=1, sort_keys=True)
        new = RESULTS.with_suffix(".new")
        new.write_text(f"{text}\n")
        new.replace(RESULTS)


def table(mutants: Sequence[Mutant], results: dict[str, Any]) -> str:
    """Return what is known as Markdown: the counts, and each mutant with the files that noticed."""
    strong = {file for stage in STRONG for file in expanded(stage.files)}
    known = {each.name: results[each.name] for each in mutants if _counts(each, results)}
    killed = {name: set(result["killed"]) for name, result in known.items()}
    by_strong = {name for name, files in killed.items() if not files.isdisjoint(strong)}
    by_record = {name for name, files in killed.items() if files and name not in by_strong}
    # Nobody knows whether the strong part would notice these too.
    by_named = {name for name in by_record if "named_only" in known[name]}
    survived = len(known) - len(by_strong) - len(by_record)
    lines = [
        f"{len(mutants)} mutants stand, and {len(known)} were run. The strong part kills"
        f" {len(by_strong)}. Tests that the record names kill {len(by_record) - len(by_named)} that"
        f" the strong part missed, and {len(by_named)} that ran without the strong part"
        f" (`--named`). Nothing that was run kills {survived}.",
        "",
        "| defect put back | noticed by |",
        "|---|---|",
    ]
    for mutant in mutants:
        files = ", ".join(f"`{file}`" for file in sorted(killed.get(mutant.name, ())))
        nothing = "**nothing that was run**" if mutant.name in known else "not run"
        lines.append(f"| `{mutant.name}` | {files or nothing} |")
    idle = strong.union(*(result["passed"] for result in known.values())).difference(
        *killed.values()
    )
    lines += ["", "Ran beside a mutant or stood in the strong part, and killed none of these:", ""]
    return "\n".join([*lines, *(f"- `{file}`" for file in sorted(idle))])


def _counts(mutant: Mutant, results: dict[str, Any]) -> bool:
    return results.get(mutant.name, {}).get("digest") == mutant.digest


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="see that each edit still applies")
    parser.add_argument("--table", action="store_true", help="print what earlier runs found")
    parser.add_argument("--only", nargs="+", default=[], help="names of mutants")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn by --seed, run anew")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=40, help="histories of the simulation")
    names = [each.name for each in STRONG]
    parser.add_argument("--stages", nargs="+", choices=names, help="of the strong part; all")
    parser.add_argument("--notes", type=Path, help="use entered-*.json of another run")
    parser.add_argument("--most", type=int, help="files of a stage, those nearest to the change")
    parser.add_argument("--any-tree", action="store_true", help="results of another tree count")
    parser.add_argument("--whole", action="store_true", help="every test, past the first killer")
    parser.add_argument("--named", action="store_true", help="only tests that the record names")
    parser.add_argument("--out", type=Path, default=Path("kill_matrix_out"))
    arguments = parser.parse_args()
    wrong = list(faults())
    print("\n".join(wrong), end="\n" if wrong else "")
    if arguments.check or wrong:
        return 1 if wrong else 0
    _, mutants = load()
    if arguments.table:
        print(table(mutants, read_results()))
        return 0
    unknown = set(arguments.only) - {each.name for each in mutants}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [each for each in mutants if not arguments.only or each.name in arguments.only]
    if arguments.named:
        chosen = [each for each in chosen if each.record_tests]
    if arguments.sample:
        chosen = random.Random(arguments.seed).sample(chosen, arguments.sample)
    return _run_all(chosen, arguments)


def _run_all(chosen: list[Mutant], arguments: argparse.Namespace) -> int:
    arguments.out.mkdir(parents=True, exist_ok=True)
    survived: list[str] = []
    with Workplace() as place:
        stages = [] if arguments.named else arguments.stages or [each.name for each in STRONG]
        strong = [each for each in STRONG if each.name in stages]
        matrix = Matrix(place, strong, arguments)
        if arguments.notes is not None:
            matrix.take_notes(arguments.notes)
        elif not arguments.sample:
            matrix.note_entered()
        for mutant in chosen:
            began_s = time.monotonic()
            kept = {} if arguments.sample else read_results().get(mutant.name, {})
            result = matrix.judge(mutant, kept)
            killers = ", ".join(f"{file}: {test}" for file, test in result["killed"].items())
            seconds = time.monotonic() - began_s
            print(f"{mutant.name}: {killers or 'SURVIVED'} ({seconds:.0f} s)", flush=True)
            survived += [] if killers else [mutant.name]
            if not arguments.sample:
                keep_result(mutant.name, result)
    print(f"{len(chosen)} mutants, {len(survived)} survived: {' '.join(survived)}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
