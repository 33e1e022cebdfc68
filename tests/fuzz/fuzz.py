"""Coverage-guided fuzzing of each decoder by atheris, in a fork each: `make fuzz`.

    python tests/fuzz/fuzz.py --seconds 60 [NAME ...]

Exit status 1 when a decoder raised anything but its typed errors, took over five seconds for one
input or over 2 GiB; the input is kept below ``--out``. Also when the time of a decoder grows with
the square of its input (``growth``). No test of `make test` asserts a time: a machine that is busy
would fail it. This program may, since it runs by itself and compares a decoder with itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import types
from pathlib import Path
from typing import NoReturn

CORPUS = Path(__file__).resolve().parent / "corpus"
_OURS = ("emergency_ckpt", "fuzz_native")  # the second is a program above native code
_LIMITS = ("-timeout=5", "-rss_limit_mb=2048", "-max_len=65536")


def _instrument() -> None:
    """Count the branches of our functions: seconds, so once, before the forks of the targets."""
    import atheris  # noqa: PLC0415 - of this program alone
    from fuzz_places import ALL  # noqa: PLC0415

    assert ALL  # its import has loaded the functions
    # atheris.instrument_imports sees nothing of an editable installation.
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and str(each.__module__).startswith(_OURS):
            atheris.instrument_func(each)


def _fuzz_here(name: str, options: argparse.Namespace) -> NoReturn:
    """Fuzz one target in this process, a fork, with its output in a log."""
    import atheris  # noqa: PLC0415
    from fuzz_places import ALL  # noqa: PLC0415

    found = options.out / name
    known = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    arguments = [
        *(str(found), *known, *_LIMITS, f"-max_total_time={options.seconds}"),
        f"-seed={options.seed}",
        f"-artifact_prefix={options.out}/failed_{name}_",
    ]
    log = os.open(_log(name, options), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    atheris.Setup([sys.argv[0], *arguments], ALL[name].run)
    atheris.Fuzz()
    sys.exit(1)  # Fuzz ends the process by SystemExit; libFuzzer writes the input at its exit


def _write_seeds(name: str, directory: Path) -> None:
    from fuzz_places import ALL  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(ALL[name].seeds):
        (directory / f"seed_{number}").write_bytes(seed)


def _log(name: str, options: argparse.Namespace) -> Path:
    return options.out / f"{name}.log"


def _start(name: str, options: argparse.Namespace) -> int:
    """Fork a process that fuzzes one target; return its id."""
    _write_seeds(name, options.out / name)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _fuzz_here(name, options)
    return child


def _fuzz(names: list[str], options: argparse.Namespace) -> list[str]:
    """Fuzz targets, as many at once as there are cores; print each result, return who failed."""
    waiting, failed = list(reversed(names)), list[str]()
    running: dict[int, str] = {}
    cores = len(os.sched_getaffinity(0))
    while waiting or running:
        while waiting and len(running) < cores:
            name = waiting.pop()
            running[_start(name, options)] = name
        child, status = os.wait()
        name = running.pop(child)
        lines = _log(name, options).read_text(errors="replace").splitlines()
        runs = next((line for line in reversed(lines) if "runs in" in line), "")
        print(f"{name}: {'failed' if status else 'no failure'}; {runs}", flush=True)
        if status:
            failed.append(name)
    return failed


def _grows_too_fast(name: str) -> bool:
    """Print the alarms of one decoder of bytes, and return whether there is one."""
    from fuzz_native import NATIVE  # noqa: PLC0415 - a program is no document
    from fuzz_places import ALL  # noqa: PLC0415
    from growth import alarms  # noqa: PLC0415

    if name in NATIVE:
        return False
    corpus = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    found = list(alarms(name, ALL[name], corpus))
    for alarm in found:
        print(f"too slow: {alarm}", flush=True)
    return bool(found)


def _fuzz_all(options: argparse.Namespace) -> int:
    """Compare times, then fuzz; return the exit status."""
    from fuzz_places import ALL  # noqa: PLC0415

    names = options.names or list(ALL)
    failed = [] if options.no_growth else [name for name in names if _grows_too_fast(name)]
    _instrument()
    failed += _fuzz(names, options)
    print(f"failed: {', '.join(failed)}; see {options.out}" if failed else "no failures")
    return 1 if failed else 0


def main() -> int:
    """Fuzz the named targets, or all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each decoder")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs; 0: another each time")
    parser.add_argument("--out", type=Path, default=Path("fuzz_out"))
    parser.add_argument("--no-growth", action="store_true", help="compare no times")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
    options.out.mkdir(parents=True, exist_ok=True)
    return _fuzz_all(options)


if __name__ == "__main__":
    sys.exit(main())
