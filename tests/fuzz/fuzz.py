"""Coverage-guided fuzzing of each decoder by atheris, in a process each: `make fuzz`.

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
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"
_OURS = ("emergency_ckpt", "fuzz_native")  # the second is a program above native code
_LIMITS = ("-timeout=5", "-rss_limit_mb=2048", "-max_len=65536")


def _fuzz_one(name: str, arguments: list[str]) -> None:
    import atheris  # noqa: PLC0415 - of the fuzzing process alone
    from fuzz_places import ALL  # noqa: PLC0415

    # atheris.instrument_imports sees nothing of an editable installation.
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and str(each.__module__).startswith(_OURS):
            atheris.instrument_func(each)
    atheris.Setup([sys.argv[0], *arguments], ALL[name].run)
    atheris.Fuzz()


def _write_seeds(name: str, directory: Path) -> None:
    from fuzz_places import ALL  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(ALL[name].seeds):
        (directory / f"seed_{number}").write_bytes(seed)


def _fuzz(name: str, options: argparse.Namespace) -> bool:
    """Fuzz one target in a process of its own; print the result, and return whether it failed."""
    out: Path = options.out
    found = out / name
    _write_seeds(name, found)
    known = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    command = [
        *(sys.executable, __file__, "--one", name, "--"),
        *(str(found), *known, *_LIMITS, f"-max_total_time={options.seconds}"),
        f"-seed={options.seed}",
        f"-artifact_prefix={out}/failed_{name}_",
    ]
    log = out / f"{name}.log"
    with log.open("wb") as file:
        status = subprocess.run(command, stdout=file, stderr=file, check=False).returncode
    lines = log.read_text(errors="replace").splitlines()
    runs = next((line for line in reversed(lines) if "runs in" in line), "")
    print(f"{name}: {'failed' if status else 'no failure'}; {runs}", flush=True)
    return status != 0


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
    """Fuzz the targets, as many at once as there are cores; return the exit status."""
    from fuzz_places import ALL  # noqa: PLC0415

    names = options.names or list(ALL)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(lambda name: _fuzz(name, options), names))
    failed = [name for name, is_failed in zip(names, results, strict=True) if is_failed]
    if not options.no_growth:
        failed += [name for name in names if _grows_too_fast(name)]
    print(f"failed: {', '.join(failed)}; see {options.out}" if failed else "no failures")
    return 1 if failed else 0


def main() -> int:
    """Fuzz the named targets, or all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each decoder")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs; 0: another each time")
    parser.add_argument("--out", type=Path, default=Path("fuzz_out"))
    parser.add_argument("--no-growth", action="store_true", help="compare no times")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
    if options.one:
        _fuzz_one(options.one, options.names)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    return _fuzz_all(options)


if __name__ == "__main__":
    sys.exit(main())
