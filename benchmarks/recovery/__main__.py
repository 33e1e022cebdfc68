"""Measure the time that a job loses after a lost slice, and the parts of that time.

    python -m benchmarks.recovery --rounds 5

`eckpt launch` or Slurm runs the demo's model, slice 0 is killed and loses its RAM, and the job
starts again. Measures this checkpointer and Orbax's emergency manager, with and without JAX's
compilation cache. With ``--processes 4,16,64`` this one alone, in jobs of that many processes of a
smaller model, part by part. benchmarks/README.md explains the measurements.
"""

import argparse
import compileall
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import emergency_ckpt
from benchmarks.common import machine, program, tables
from benchmarks.common.program import positive, positives, some_of
from benchmarks.recovery import launched, phases
from examples.faults.faults import parse_fault

_CONTENDERS = ("ours", "orbax-emergency")
_CACHE = {"with cache": {}, "no cache": {"JAX_ENABLE_COMPILATION_CACHE": "0"}}
_PROCESS_BYTES = 400 << 20
"""Memory of one more process of a job; JAX and what it imports take nearly all of it."""


@dataclasses.dataclass(frozen=True)
class _Variant:
    """A job to measure."""

    name: str
    worker: list[str]
    cache: str
    hosts_per_slice: int


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    variants = _variants(parser, options)
    about = machine.facts()
    # As of an installed wheel; else each process of an environment that keeps no bytecode compiles.
    compileall.compile_dir(Path(emergency_ckpt.__file__).parent, quiet=1)
    rounds: dict[str, list[phases.Recovery]] = {variant.name: [] for variant in variants}
    loads: list[float] = []
    with contextlib.ExitStack() as stack:
        cluster = None
        if options.engine == "slurm":
            from benchmarks.recovery.slurm import Slurm  # noqa: PLC0415 - it needs the tests' cluster

            cluster = stack.enter_context(contextlib.closing(Slurm(options.timeout_s)))
        for number in range(options.rounds):
            for variant in program.in_turn(variants, number):
                print(f"round {number + 1} of {options.rounds}: {variant.name}", file=sys.stderr)
                loads.append(os.getloadavg()[0])
                try:
                    marks = _run(options, variant, cluster)
                    rounds[variant.name].append(phases.recovery(marks))
                except RuntimeError as failure:
                    print(f"recovery: {variant.name}: {failure}", file=sys.stderr)
                    return 1
    medians = {name: phases.median(each) for name, each in rounds.items()}
    document = {
        "engine": options.engine,
        "load_averages": loads,
        "rounds": {k: [dataclasses.asdict(r) for r in v] for k, v in rounds.items()},
    }
    name = "recovery" if options.engine == "launch" else f"recovery_{options.engine}"
    name = name if options.processes is None else f"{name}_processes"
    program.publish(options, name, about, _text(options, about, medians, loads), document)
    return 0


def _variants(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[_Variant]:
    worker = ["--wait", "--contender"]
    if options.processes is None:
        return [
            _Variant(f"{name}, {cache}", [*worker, name], cache, phases.HOSTS_PER_SLICE)
            for cache in options.caches
            for name in options.contenders
        ]
    if options.engine != "launch":
        parser.error("--processes needs --engine launch: the cluster has five nodes")
    if odd := [count for count in options.processes if count % phases.SLICES]:
        parser.error(f"{odd[0]} processes do not divide into {phases.SLICES} slices")
    wanted_bytes = max(options.processes) * _PROCESS_BYTES
    if machine.available_memory_bytes() < wanted_bytes:
        taken = f"{max(options.processes)} processes take about {wanted_bytes >> 20} MiB"
        parser.error(f"{taken}: more than this machine has left")
    worker += ["ours", "--small"]
    return [
        _Variant(f"{count} processes", worker, "with cache", count // phases.SLICES)
        for count in options.processes
    ]


def _run(options: argparse.Namespace, variant: _Variant, cluster: Any) -> list[phases.Mark]:
    """Run a job under Slurm if there is its ``cluster``, else under `eckpt launch`."""
    if cluster is not None:
        return cluster.run(variant.worker, _CACHE[variant.cache])
    return launched.run(
        variant.worker,
        hosts_per_slice=variant.hosts_per_slice,
        faults=[parse_fault(f"step={phases.FAULT_STEP} kill=slice:0 lose-ram exact")],
        ramdisk=options.ramdisk,
        storage=options.ramdisk,
        timeout_s=options.timeout_s,
        environ=_CACHE[variant.cache],
    )


def _parser() -> argparse.ArgumentParser:
    parser = program.new_parser("recovery", __doc__, job_timeout_s=300.0)
    parser.add_argument("--engine", choices=("launch", "slurm"), default="launch")
    parser.add_argument(
        "--processes",
        type=positives,
        help="numbers of processes of jobs of a small model, with commas between",
    )
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--contenders", type=some_of(_CONTENDERS), default=list(_CONTENDERS))
    parser.add_argument("--caches", type=some_of(_CACHE), default=list(_CACHE))
    return parser


def _text(
    options: argparse.Namespace,
    about: dict[str, Any],
    medians: Mapping[str, phases.Recovery],
    loads: list[float],
) -> str:
    hosts = "one-process hosts" if options.processes else f"{phases.HOSTS_PER_SLICE} hosts"
    return "\n".join(
        [
            f"{options.engine}: {phases.SLICES} slices of {hosts}, {options.rounds} rounds;"
            f" {machine.text(about)}",
            "",
            _table(medians, has_cpu=options.processes is not None),
            "",
            f"Load averages before the jobs: {min(loads):.1f} to {max(loads):.1f}.",
        ]
    )


def _table(medians: Mapping[str, phases.Recovery], *, has_cpu: bool) -> str:
    """Return each part and whose it is; with ``has_cpu`` also CPU times and the restore's parts."""
    number, found = tables.number, medians.values()
    of_cpu = " (CPU of a process, of the leader, of its main thread)" if has_cpu else ""
    rows = [[f"seconds, medians{of_cpu}", "whose", *medians]]

    def row(
        title: str, owner: str, seconds: Callable[[phases.Recovery], float], key: str = ""
    ) -> None:
        cells: list[str] = []
        for each in found:
            cell = number(seconds(each))
            if has_cpu and key in each.mean_cpu_s:
                cpu_s = (each.mean_cpu_s[key], each.leader_cpu_s[key], each.main_cpu_s[key])
                cell += f" ({', '.join(map(number, cpu_s))})"
            cells.append(cell)
        rows.append([title, owner, *cells])

    for key, part in phases.PARTS.items():
        row(part.title, part.owner, lambda each, key=key: each.parts[key], key)
        if has_cpu and key == "restore":
            for name in ("plan", "load", "shards", "host_state", "agree"):
                title = f"- of it, at the leader: {name}"
                row(title, "ours", lambda each, name=name: each.spent_s[name])
    row("fault to first step", "", lambda each: each.total_s)
    row("- of it the checkpointer: start and restore", "ours", lambda each: each.ours_s)
    row("CPU time, all processes", "", lambda each: each.cpu_s)
    row(phases.SAVE, "ours", lambda each: each.save_s, phases.SAVE)
    return tables.markdown(rows)


if __name__ == "__main__":
    sys.exit(main())
