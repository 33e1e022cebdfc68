"""Measure the time that a job loses after a lost slice, and the parts of that time.

    python -m benchmarks.recovery --rounds 5

`eckpt launch` runs the demo's model, slice 0 is killed and loses its RAM, and the job starts again.
Measures this checkpointer and Orbax's emergency manager, with and without JAX's compilation cache.
benchmarks/README.md explains the measurements.
"""

import argparse
import compileall
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import emergency_ckpt
from benchmarks import ROOT
from benchmarks.common import machine, tables
from benchmarks.common.arguments import above_0, positive, some_of
from benchmarks.recovery import phases, plot
from emergency_ckpt.launch.faults import parse_fault
from emergency_ckpt.launch.job import JobSpec
from emergency_ckpt.launch.supervisor import Supervisor

_CONTENDERS = ("ours", "orbax-emergency")
_CACHE = {"with cache": {}, "no cache": {"JAX_ENABLE_COMPILATION_CACHE": "0"}}
_FAULT_STEP, _RESTORE_STEP, _LAST_STEP = 13, 10, 14


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
    for number in range(options.rounds):
        turn = number % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            print(f"round {number + 1} of {options.rounds}: {', '.join(variant)}", file=sys.stderr)
            loads.append(os.getloadavg()[0])
            try:
                rounds[", ".join(variant)].append(_measure(*variant, options))
            except RuntimeError as failure:
                print(f"recovery: {failure}", file=sys.stderr)
                return 1
    medians = {name: phases.median(each) for name, each in rounds.items()}
    print(_text(options, about, medians, loads))
    document = {
        "schema_version": 1,
        "machine": about,
        "load_averages": loads,
        "rounds": {k: [dataclasses.asdict(r) for r in v] for k, v in rounds.items()},
    }
    (options.out / "recovery.json").write_text(json.dumps(document, indent=1) + "\n")
    plot.draw(medians, options.out / "recovery.png")
    print(f"\nWritten to {options.out / 'recovery.json'} and recovery.png")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.recovery", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--slices", type=positive, default=2)
    parser.add_argument("--hosts-per-slice", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--contenders", type=some_of(_CONTENDERS), default=list(_CONTENDERS))
    parser.add_argument("--caches", type=some_of(_CACHE), default=list(_CACHE))
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--timeout-s", type=above_0, default=300.0, help="for each job")
    return parser


def _measure(contender: str, cache: str, options: argparse.Namespace) -> phases.Recovery:
    """Run one job and return its recovery. RuntimeError, with the log, when it did not finish."""
    work = Path(tempfile.mkdtemp(prefix="eckpt-recovery-", dir=options.ramdisk))
    try:
        for name in ("storage", "marks"):
            (work / name).mkdir()
        command = [sys.executable, "-m", "benchmarks.recovery.worker", "--contender", contender]
        command += ["--persistent-dir", str(work / "storage"), "--steps", str(_LAST_STEP)]
        command += ["--marks-dir", str(work / "marks")]
        command += ["--restore-step", str(_RESTORE_STEP)]
        spec = JobSpec(
            command=tuple(command),
            slices=options.slices,
            hosts_per_slice=options.hosts_per_slice,
            devices_per_host=1,
            local_root=work / "ram",
            log_dir=work / "logs",
            env={"PYTHONPATH": str(ROOT), **_CACHE[cache]},
            max_restarts=1,
        )
        fault = parse_fault(f"step={_FAULT_STEP} kill=slice:0 lose-ram exact")
        result = Supervisor(spec, faults=[fault]).run(options.timeout_s)
        if result.error is not None:
            raise RuntimeError(f"{contender}, {cache}: {result.error}")
        events = [
            phases.Moment(each.time_s, each.name, _life(each.fields)) for each in result.events
        ]
        return phases.recovery(events, phases.read_marks(work / "marks"))
    finally:
        shutil.rmtree(work)


def _life(fields: Mapping[str, object]) -> int:
    count = fields.get("restart_count", 0)
    assert isinstance(count, int)
    return count


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
        f"{options.slices} slices of {options.hosts_per_slice} hosts, {options.rounds} rounds;"
        f" {about['cores']} cores, {about['cpu']}, {about['memory']}",
        "",
        tables.markdown(rows),
    ]
    if max(loads) > options.slices * options.hosts_per_slice:
        lines += ["", f"Load averages before the jobs: {min(loads):.1f} to {max(loads):.1f}."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
