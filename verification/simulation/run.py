"""Histories of the product's own code under a scheduler that seeds decide: `make simulate`.

    python verification/simulation/run.py --seeds 1000 [--first 1] [--workers 2] [--seconds 60]
    python verification/simulation/run.py --seed 17 [--verbose]
    python verification/simulation/run.py --plan NAME.json [--verbose]
    python verification/simulation/run.py --mutants [NAME ...] [--first 1]
    python verification/simulation/run.py --check

``--check`` sees that each mutant is an edit of code that is there.

A failing seed is printed with the command that runs it again, and its plan is made smaller and
written below ``--out``. A mutant is found by the simulation, or by the tests that it names. Exit
status 1 when a seed failed, or when a mutant was not found.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path += [str(HERE.parent), str(HERE.parents[1] / "tests" / "support")]

MOST_LIVES_FOR_A_MUTANT = 5000
_PIECE = 100
"""So many seeds run in one process: each later one takes longer there, the 700th three times."""
_AGAIN = "python verification/simulation/run.py"


def _run_plan(plan: object, *, verbose: bool = False) -> int:
    """Run a plan; return its trace. AssertionError with ``life``: the number of the life."""
    from history import History  # noqa: PLC0415 - it imports the product under the simulation

    root = Path(tempfile.mkdtemp(prefix="eckpt-simulation-", dir="/dev/shm"))
    history = History(plan, root, verbose=verbose)  # pyright: ignore
    try:
        return history.run()
    except AssertionError as error:
        error.add_note(f"in life {history.number}")
        raise
    finally:
        shutil.rmtree(root)


def _outcome(plan: object) -> tuple[str, int]:
    """Return the failure of a plan in one line, empty when it holds; and its trace, 0 if none."""
    try:
        return "", _run_plan(plan)
    except AssertionError as error:
        place = next(iter(getattr(error, "__notes__", ())), "")
        text = str(error).splitlines() or [""]
        place = place if len(place) < 20 else ""
        return f"{type(error).__name__} {place}: {text[0][:400]}", 0
    except Exception as error:  # noqa: BLE001 - of the simulation itself; the other seeds go on
        traceback.print_exc()
        return f"the simulation: {error!r}", 0


def _failure(plan: object) -> str:
    """Return the failure of a plan in one line, empty when it holds."""
    return _outcome(plan)[0]


def _work(arguments: argparse.Namespace) -> int:
    """Run seeds in this process; print a line of JSON for each that fails, and one in the end."""
    import install  # noqa: PLC0415
    import mutants  # noqa: PLC0415
    from plan import draw  # noqa: PLC0415

    install.product()
    for name in arguments.names:
        mutants.MUTANTS[name].put_back()
    began_s = time.process_time()
    lives = seeds = failed = 0
    end_s = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        if lives >= arguments.lives > 0 or (end_s is not None and time.monotonic() > end_s):
            break
        plan = draw(seed)
        failure = _failure(plan)
        lives += len(plan.lives)
        seeds += 1
        if failure:
            failed += 1
            print(json.dumps({"seed": seed, "failure": failure, "lives": lives}), flush=True)
            if arguments.names:
                break
    total = {"seeds": seeds, "lives": lives, "failed": failed}
    print(json.dumps({**total, "cpu_s": time.process_time() - began_s}), flush=True)
    return 0


def _start(*more: str) -> subprocess.Popen[str]:
    # Sets of texts have an order that this decides, and the trace must not depend on the process.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "run.py"), "--work", *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _lines(worker: subprocess.Popen[str]) -> Iterator[dict[str, float | str]]:
    assert worker.stdout is not None
    for line in worker.stdout:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _simulate(arguments: argparse.Namespace) -> int:
    """Run the seeds in pieces, each in a process of its own, as many at once as workers."""
    began_s = time.monotonic()
    end = arguments.first + arguments.seeds
    most = min(_PIECE, -(-arguments.seeds // arguments.workers))
    pieces = [(first, min(most, end - first)) for first in range(arguments.first, end, most)]
    with ThreadPoolExecutor(arguments.workers) as pool:
        totals = list(pool.map(lambda piece: _run_piece(arguments, *piece, began_s), pieces))
    seeds, lives, failed = (sum(total[n] for total in totals) for n in range(3))
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, cpu_s = time.monotonic() - began_s, spent.ru_utime + spent.ru_stime
    print(
        f"{seeds} seeds, {lives} lives, {failed} failed; {seconds:.0f} s, {cpu_s:.0f} s of CPU,"
        f" {lives / max(cpu_s, 1e-9):.1f} lives per second of CPU,"
        f" {lives / seconds * 3600:.0f} per hour"
    )
    return 1 if failed else 0


def _run_piece(
    arguments: argparse.Namespace, first: int, count: int, began_s: float
) -> tuple[int, int, int]:
    """Run some seeds in a process; return how many were run, their lives, and how many failed."""
    limit: list[str] = []
    if arguments.seconds is not None:
        left_s = arguments.seconds - (time.monotonic() - began_s)
        if left_s <= 0:
            return 0, 0, 0
        limit = ["--seconds", str(left_s)]
    worker = _start("--first", str(first), "--seeds", str(count), *limit)
    total: tuple[int, int, int] | None = None
    for line in _lines(worker):
        if "seed" not in line:
            total = int(line["seeds"]), int(line["lives"]), int(line["failed"])
            continue
        print(f"seed {line['seed']} FAILED: {line['failure']}")
        print(f"    again: {_AGAIN} --seed {line['seed']} --verbose", flush=True)
        if not arguments.unshrunk:
            _shrink_in_process(int(line["seed"]), arguments.out)
    if worker.wait() or total is None:
        print(f"the worker of seeds {first} to {first + count - 1} ended early", flush=True)
        return 0, 0, 1
    what = f"{total[0]} seeds from {first}: {total[1]} lives, {total[2]} failed"
    print(what, file=sys.stderr, flush=True)
    return total


def _shrink_in_process(seed: int, out: Path) -> None:
    command = [sys.executable, str(HERE / "run.py"), "--shrink", str(seed), "--out", str(out)]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, env=environment, check=False, stderr=subprocess.DEVNULL)


def _shrink(seed: int, out: Path) -> int:
    """Make the plan of a failing seed smaller while it fails alike, and write it down."""
    import install  # noqa: PLC0415
    from plan import draw, encoded, smaller  # noqa: PLC0415

    install.product()
    plan = draw(seed)
    kind = _failure(plan).partition(":")[2][:12]
    tries = itertools.count()
    shrinking = True
    while shrinking:
        shrinking = False
        for candidate in smaller(plan):
            if next(tries) > 150:
                break
            if _failure(candidate).partition(":")[2][:12] == kind:
                plan, shrinking = candidate, True
                break
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"seed_{seed}.json"
    path.write_text(encoded(plan))
    print(f"    smaller: {_AGAIN} --plan {path} --verbose", flush=True)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    """Run one seed or plan in this process, and print its trace or its failure."""
    import install  # noqa: PLC0415
    import mutants  # noqa: PLC0415
    from plan import decoded, draw  # noqa: PLC0415

    install.product()
    for name in arguments.names:
        mutants.MUTANTS[name].put_back()
    plan = decoded(arguments.plan.read_text()) if arguments.plan else draw(arguments.seed)
    if arguments.verbose:
        trace = _run_plan(plan, verbose=True)
    else:
        failure, trace = _outcome(plan)
        if failure:
            print(failure)
            return 1
    print(f"{len(plan.lives)} lives, trace {trace:012x}")
    return 0


def _find_mutants(arguments: argparse.Namespace) -> int:
    """Put each mutant back, and report after how many lives, and by which tests, it is found.

    Mutants that are named are simulated, also those that only tests find.
    """
    from mutants import MUTANTS  # noqa: PLC0415

    names = arguments.names or [name for name, each in MUTANTS.items() if each.simulated]
    waiting = [(name, False) for name in names]
    waiting += [
        (name, True) for name, each in MUTANTS.items() if each.tests and not arguments.names
    ]
    missed: list[str] = []
    running: list[tuple[str, bool, subprocess.Popen[str]]] = []
    while waiting or running:
        while waiting and len(running) < arguments.workers:
            name, by_tests = waiting.pop(0)
            running.append((name, by_tests, _look_for(name, by_tests, arguments)))
        name, by_tests, worker = running.pop(0)
        found = _found_by_tests(worker) if by_tests else _found_in_lives(worker)
        missed += [] if found else [name]
        print(f"{name}: {found or 'NOT found'}", flush=True)
    return 1 if missed else 0


def _check_mutants() -> int:
    """Put each mutant back in a process of its own, and say which is of code that is gone."""
    import install  # noqa: PLC0415
    from mutants import MUTANTS  # noqa: PLC0415

    install.product()
    gone: list[str] = []
    for name, mutant in MUTANTS.items():
        child = os.fork()
        if child == 0:
            try:
                mutant.put_back()
            except BaseException as error:  # noqa: BLE001 - printed, and the child ends
                print(f"{name}: {error!r}", flush=True)
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            gone.append(name)
    print(f"{len(MUTANTS)} mutants, {len(gone)} of code that is gone")
    return 1 if gone else 0


def _look_for(name: str, by_tests: bool, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    if by_tests:
        command = [sys.executable, str(HERE / "mutated.py"), name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lives = str(arguments.lives or MOST_LIVES_FOR_A_MUTANT)
    first = str(arguments.first)
    return _start("--first", first, "--seeds", lives, "--lives", lives, "--work", name)


def _found_in_lives(worker: subprocess.Popen[str]) -> str:
    found = next((line for line in list(_lines(worker)) if "seed" in line), None)
    worker.wait()
    if found is None:
        return ""
    return f"found after {found['lives']} lives: seed {found['seed']}: {found['failure']}"


def _found_by_tests(worker: subprocess.Popen[str]) -> str:
    told, _ = worker.communicate()
    failed = [line for line in told.splitlines() if ": failed " in line]
    return "; ".join(line.partition(": ")[2] for line in failed) if worker.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="mutants to put back")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--lives", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--shrink", type=int)
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--check", action="store_true", help="see that each mutant still applies")
    parser.add_argument("--work", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--unshrunk", action="store_true", help="only name the seeds that fail")
    parser.add_argument("--out", type=Path, default=Path("simulation_out"))
    arguments = parser.parse_args()
    if arguments.work:
        return _work(arguments)
    if arguments.check:
        return _check_mutants()
    if arguments.shrink is not None:
        return _shrink(arguments.shrink, arguments.out)
    if arguments.seed is not None or arguments.plan is not None:
        if os.environ.get("PYTHONHASHSEED") != "0":
            os.environ["PYTHONHASHSEED"] = "0"
            os.execv(sys.executable, [sys.executable, *sys.argv])
        return _show(arguments)
    return _find_mutants(arguments) if arguments.mutants else _simulate(arguments)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # not through the finalizers of what the simulation holds
