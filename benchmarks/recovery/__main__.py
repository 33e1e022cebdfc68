"""Measure the time that a job loses after a lost slice, and the parts of that time.

    python -m benchmarks.recovery --rounds 5

`eckpt launch` or Slurm runs the demo's model, slice 0 is killed and loses its RAM, and the job
starts again. Measures this checkpointer and Orbax's emergency manager, with and without JAX's
compilation cache. With ``--processes 4,16,64`` this one alone, in jobs of that many processes of a
smaller model, part by part.
benchmarks/README.md explains the measurements.
"""

import argparse
import compileall
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emergency_ckpt
from benchmarks.common import machine, tables
from benchmarks.common.arguments import above_0, positive, positives, some_of
from benchmarks.recovery import phases, plot
from benchmarks.recovery.launched import Launcher

_CONTENDERS = ("ours", "orbax-emergency")
_CACHE = {"with cache": {}, "no cache": {"JAX_ENABLE_COMPILATION_CACHE": "0"}}
_ENGINES = ("launch", "slurm")
_PROCESS_BYTES = 400 << 20
"""Memory of one more process of a job; JAX and what it imports take nearly all of it."""
_OWNERS = {
    "notice": "launcher",
    "stop": "launcher",
    "start": "Python, imports",
    "join": "JAX",
    "describe": "JAX",
    "open": "ours",
    "compile": "JAX",
    "restore": "ours",
    "step": "JAX",
}


@dataclasses.dataclass(frozen=True)
class _Variant:
    """A job to measure. ``hosts_per_slice``: None: as the options say."""

    name: str
    worker: list[str]
    cache: str
    hosts_per_slice: int | None = None


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    variants = _variants(parser, options)
    options.out.mkdir(parents=True, exist_ok=True)
    about = machine.facts()
    # As of an installed wheel; else each process of an environment that keeps no bytecode compiles.
    compileall.compile_dir(Path(emergency_ckpt.__file__).parent, quiet=1)
    rounds: dict[str, list[phases.Recovery]] = {variant.name: [] for variant in variants}
    loads: list[float] = []
    engine = _engine(options)
    for number in range(options.rounds):
        turn = number % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            print(f"round {number + 1} of {options.rounds}: {variant.name}", file=sys.stderr)
            loads.append(os.getloadavg()[0])
            more = {} if variant.hosts_per_slice is None else {"hosts": variant.hosts_per_slice}
            try:
                found = engine.measure(variant.worker, _CACHE[variant.cache], **more)
            except RuntimeError as failure:
                print(f"recovery: {variant.name}: {failure}", file=sys.stderr)
                engine.close()
                return 1
            rounds[variant.name].append(found)
    engine.close()
    medians = {name: phases.median(each) for name, each in rounds.items()}
    text = _text if options.processes is None else _text_of_counts
    print(text(options, about, medians, loads))
    document = {
        "schema_version": 1,
        "machine": about,
        "engine": options.engine,
        "load_averages": loads,
        "rounds": {k: [dataclasses.asdict(r) for r in v] for k, v in rounds.items()},
    }
    name = "recovery" if options.engine == "launch" else f"recovery_{options.engine}"
    name = name if options.processes is None else f"{name}_processes"
    (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    plot.draw(medians, options.out / f"{name}.png")
    print(f"\nWritten to {options.out / name}.json and .png")
    return 0


def _variants(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[_Variant]:
    if options.processes is None:
        return [
            _Variant(f"{name}, {cache}", ["--contender", name], cache)
            for cache in options.caches
            for name in options.contenders
        ]
    if options.engine != "launch":
        parser.error("--processes needs --engine launch: the cluster has five nodes")
    if odd := [count for count in options.processes if count % options.slices]:
        parser.error(f"{odd[0]} processes do not divide into {options.slices} slices")
    wanted_bytes = max(options.processes) * _PROCESS_BYTES
    if machine.available_memory_bytes() < wanted_bytes:
        taken = f"{max(options.processes)} processes take about {wanted_bytes >> 20} MiB"
        parser.error(f"{taken}: more than this machine has left")
    worker = ["--contender", "ours", "--small"]
    return [
        _Variant(f"{count} processes", worker, "with cache", count // options.slices)
        for count in options.processes
    ]


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
    parser.add_argument(
        "--processes",
        type=positives,
        help="numbers of processes of jobs of a small model, with commas between",
    )
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
        ["the checkpointer's share", *(f"{m.ours_s / m.total_s:.1%}" for m in medians.values())]
    )
    rows.append(["CPU time, all processes", *(tables.number(m.cpu_s) for m in medians.values())])
    rows.append([phases.SAVE, *(tables.number(m.save_s) for m in medians.values())])
    hosts = f"{options.slices} slices of {options.hosts_per_slice} hosts"
    lines = [_head(options, about, hosts), "", tables.markdown(rows)]
    if max(loads) > options.slices * options.hosts_per_slice:
        lines += ["", _loads(loads)]
    return "\n".join(lines)


def _text_of_counts(
    options: argparse.Namespace,
    about: dict[str, Any],
    medians: dict[str, phases.Recovery],
    loads: list[float],
) -> str:
    """Return each part by its owner, with the CPU time of a process and of the leader."""
    number, found = tables.number, medians.values()

    def row(name: str, owner: str, key: str, seconds: Callable[[phases.Recovery], float]) -> None:
        cells: list[str] = []
        for each in found:
            cpu = [each.mean_cpu_s, each.leader_cpu_s, each.main_cpu_s] if key else []
            of_it = f" ({', '.join(number(some[key]) for some in cpu)})" if cpu else ""
            cells.append(number(seconds(each)) + of_it)
        rows.append([name, owner, *cells])

    rows = [["seconds (CPU of a process, of the leader, of its main thread)", "whose", *medians]]
    for key, name in phases.NAMES.items():
        own = key if key in next(iter(found)).mean_cpu_s else ""
        row(name, _OWNERS[key], own, lambda m, key=key: m.parts[key])
    for name in ("plan", "load", "shards", "host_state", "agree"):
        row(f"- of the restore, at the leader: {name}", "ours", "", lambda m, n=name: m.spent_s[n])
    row(phases.SAVE, "ours", phases.SAVE, lambda m: m.save_s)
    row("fault to first step", "", "", lambda m: m.total_s)
    row("ours of it: start and restore", "ours", "", lambda m: m.ours_s)
    hosts = f"{options.slices} slices, one process a host"
    return "\n".join([_head(options, about, hosts), "", tables.markdown(rows), "", _loads(loads)])


def _head(options: argparse.Namespace, about: dict[str, Any], hosts: str) -> str:
    return (
        f"{options.engine}: {hosts}, {options.rounds} rounds;"
        f" {about['cores']} cores, {about['cpu']}, {about['memory']}"
    )


def _loads(loads: list[float]) -> str:
    return f"Load averages before the jobs: {min(loads):.1f} to {max(loads):.1f}."


if __name__ == "__main__":
    sys.exit(main())
