"""Measure the time that a job loses after a lost slice, and the parts of that time.

    python -m benchmarks.recovery --rounds 5

`eckpt launch` or Slurm runs the demo's model, slice 0 is killed and loses its RAM, and the job
starts again. Measures this checkpointer and Orbax's emergency manager, with and without JAX's
compilation cache.
benchmarks/README.md explains the measurements.
"""

import argparse
import compileall
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import emergency_ckpt
from benchmarks.common import machine, tables
from benchmarks.common.arguments import above_0, positive, some_of
from benchmarks.recovery import phases, plot
from benchmarks.recovery.launched import Launcher

_CONTENDERS = ("ours", "orbax-emergency")
_CACHE = {"with cache": {}, "no cache": {"JAX_ENABLE_COMPILATION_CACHE": "0"}}
_ENGINES = ("launch", "slurm")


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    about = machine.facts()
    # As of an installed wheel; else each process of an environment that keeps no bytecode compiles.
    compileall.compile_dir(Path(emergency_ckpt.__file__).parent, quiet=1)
    variants = [(name, cache) for cache in options.caches for name in options.contenders]
    rounds: dict[str, list[phases.Recovery]] = {", ".join(variant): [] for variant in variants}
    loads: list[float] = []
    engine = _engine(options)
    for number in range(options.rounds):
        turn = number % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            print(f"round {number + 1} of {options.rounds}: {', '.join(variant)}", file=sys.stderr)
            loads.append(os.getloadavg()[0])
            contender, cache = variant
            worker = ["--contender", contender]
            try:
                rounds[", ".join(variant)].append(engine.measure(worker, _CACHE[cache]))
            except RuntimeError as failure:
                print(f"recovery: {contender}, {cache}: {failure}", file=sys.stderr)
                engine.close()
                return 1
    engine.close()
    medians = {name: phases.median(each) for name, each in rounds.items()}
    print(_text(options, about, medians, loads))
    document = {
        "schema_version": 1,
        "machine": about,
        "engine": options.engine,
        "load_averages": loads,
        "rounds": {k: [dataclasses.asdict(r) for r in v] for k, v in rounds.items()},
    }
    name = "recovery" if options.engine == "launch" else f"recovery_{options.engine}"
    (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    plot.draw(medians, options.out / f"{name}.png")
    print(f"\nWritten to {options.out / name}.json and .png")
    return 0


def _engine(options: argparse.Namespace) -> Any:
    if options.engine == "launch":
        return Launcher(options)
    from benchmarks.recovery.slurm import Slurm  # noqa: PLC0415 - it needs the tests' cluster

    return Slurm(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.recovery", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--engine", choices=_ENGINES, default="launch")
    parser.add_argument("--slices", type=positive, default=2)
    parser.add_argument("--hosts-per-slice", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--contenders", type=some_of(_CONTENDERS), default=list(_CONTENDERS))
    parser.add_argument("--caches", type=some_of(_CACHE), default=list(_CACHE))
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--timeout-s", type=above_0, default=300.0, help="for each job")
    return parser


def _text(
    options: argparse.Namespace,
    about: dict[str, Any],
    medians: dict[str, phases.Recovery],
    loads: list[float],
) -> str:
    rows = [["seconds, medians", *medians]]
    for key, name in phases.NAMES.items():
        rows.append([name, *(tables.number(each.parts[key]) for each in medians.values())])
    rows.append(["fault to first step", *(tables.number(m.total_s) for m in medians.values())])
    rows.append(
        ["restore's share", *(f"{m.parts['restore'] / m.total_s:.1%}" for m in medians.values())]
    )
    rows.append(["hidden by prefetch", *(tables.number(m.hidden_s) for m in medians.values())])
    rows.append(["CPU time, all processes", *(tables.number(m.cpu_s) for m in medians.values())])
    lines = [
        f"{options.engine}: {options.slices} slices of {options.hosts_per_slice} hosts,"
        f" {options.rounds} rounds;"
        f" {about['cores']} cores, {about['cpu']}, {about['memory']}",
        "",
        tables.markdown(rows),
    ]
    if max(loads) > options.slices * options.hosts_per_slice:
        lines += ["", f"Load averages before the jobs: {min(loads):.1f} to {max(loads):.1f}."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
