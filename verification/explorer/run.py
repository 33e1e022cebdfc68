"""Every operation on storage beside every second actor, stopped at each change: `make explore`.

    python verification/explorer/run.py --place disk --every 7
    python verification/explorer/run.py --operation remove --actor newer_life --place bucket --k 5

Prints a line for each pair, and for each case that fails what is wrong and the command that repeats
it. Exit status 1 when one fails. README.md says what it shows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_TESTS = _HERE.parents[1] / "tests"
sys.path[:0] = [str(each) for each in (_HERE, _HERE.parent, _TESTS / "support", _TESTS / "jobs")]
_READY = "ECKPT_EXPLORER_SHIM"


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operation", action="append", help="one of operations.py; all without it")
    parser.add_argument("--actor", action="append", help="one of operations.py; all without it")
    parser.add_argument("--place", choices=("disk", "bucket"), default="disk")
    parser.add_argument("--k", type=int, help="stop at this change alone")
    parser.add_argument("--every", type=int, default=1, help="stop at each n-th change")
    parser.add_argument("--choose", type=int, help="each n-th pair alone, at one change of its own")
    parser.add_argument("--mutant", help="a defect of verification/kill_matrix that is put back")
    parser.add_argument("--json", help="write what came of each case to this file")
    return parser.parse_args(arguments)


def started_again(place: str, root: str) -> int:
    """Run this program with what must be there before Python or a client of buckets starts."""
    from fake_gcs import FakeGcs  # noqa: PLC0415
    from seams import compiled  # noqa: PLC0415

    environment = {**os.environ, "JAX_PLATFORMS": "cpu", _READY: root}
    words = [sys.executable, __file__, *sys.argv[1:]]
    if place == "bucket":
        with FakeGcs(buckets=["bucket"]) as gcs:
            environment |= gcs.environment()
            return subprocess.run(words, env=environment, check=False).returncode
    shim = str(compiled(Path(root)))
    preload = " ".join(filter(None, [shim, os.environ.get("LD_PRELOAD")]))
    environment["LD_PRELOAD"] = preload
    return subprocess.run(words, env=environment, check=False).returncode


def explore(options: argparse.Namespace, root: str) -> int:
    if options.mutant:
        put_back(options.mutant)
    from absl import logging  # noqa: PLC0415
    from explorer import Outcome, cases  # noqa: PLC0415
    from operations import ACTORS, OPERATIONS  # noqa: PLC0415
    from seams import SHIM, Bucket, Disk  # noqa: PLC0415

    logging.set_verbosity(logging.FATAL)  # what the product says of each damage that is made here
    place = Bucket() if options.place == "bucket" else Disk(Path(root, "runs"), f"{root}/{SHIM}")
    pairs = [
        (operation, actor)
        for operation in options.operation or OPERATIONS
        for actor in options.actor or ACTORS
        if place.name in ACTORS[actor].places
    ]
    outcomes: list[Outcome] = []
    for number, (operation, actor) in enumerate(pairs):
        if options.choose and number % options.choose:
            continue
        k = 7 * number % 80 if options.choose else options.k
        begun = time.process_time()
        found = list(cases(place, operation, actor, options.every, k))
        outcomes += found
        bad = [each for each in found if each.problems]
        cpu_s = time.process_time() - begun
        print(
            f"{operation} beside {actor}: {len(found)} cases, {len(bad)} fail, {cpu_s:.1f} s",
            flush=True,
        )
        for each in bad:
            print(f"  {each.command}\n    told: {each.told or 'nothing'}")
            print("".join(f"    {problem}\n" for problem in each.problems), end="", flush=True)
    failed = sum(bool(each.problems) for each in outcomes)
    print(f"{len(outcomes)} cases, {failed} fail, {time.process_time():.0f} s of CPU")
    if options.json:
        told = [{**vars(each), "command": each.command} for each in outcomes]
        Path(options.json).write_text(json.dumps(told))
    return int(failed > 0 or not outcomes)


def put_back(name: str) -> None:
    """Import modules of the product with a defect in their text, in this process alone."""
    sys.path.append(str(_HERE.parent / "kill_matrix"))
    from defects import load  # noqa: PLC0415

    (mutant,) = (each for each in load()[1] if each.name == name)
    edits = {str(_TESTS.parent / edit.file): edit for edit in mutant.edits}
    read = SourceFileLoader.get_data
    sys.dont_write_bytecode = True

    def edited(self: SourceFileLoader, path: str) -> bytes:
        if path in map(cache_from_source, edits):
            raise FileNotFoundError(path)
        data = read(self, path)
        edit = edits.get(path)
        return data if edit is None else data.replace(edit.old.encode(), edit.new.encode())

    SourceFileLoader.get_data = edited


def main() -> int:
    options = options_of(sys.argv[1:])
    if _READY in os.environ:
        return explore(options, os.environ[_READY])
    with tempfile.TemporaryDirectory(prefix="eckpt-explorer-", dir="/dev/shm") as root:
        return started_again(options.place, root)


if __name__ == "__main__":
    sys.exit(main())
