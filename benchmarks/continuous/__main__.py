"""Measure benefit and cost of continuous saving, after the study by Orbax's and MaxText's authors.

    python -m benchmarks.continuous --slices 2 --mib 64 --rounds 3

Runs the same training without saves, with a save every 100 steps, and with each save starting as
soon as the previous one is complete, for the RAM tier and the persistent tier separately. Prints
the median interval between checkpoints, the mean step time and its increase, and the expected cost
of a failure. benchmarks/README.md explains the measurements.
"""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import ROOT
from benchmarks.common import machine
from benchmarks.common.arguments import positive
from benchmarks.common.job import Shape, plan_shape
from benchmarks.common.lives import RoundFailed, run_life
from benchmarks.continuous import report
from benchmarks.continuous.study import OFF, VARIANTS, Orders
from emergency_ckpt.tools.launch.job import JobSpec

_WORKER = Path(__file__).with_name("worker.py")
# The most of each slice's state that is held at one time: slots, and what a save still reads.
_COPIES_ON_RAMDISK = 3
_COPIES_IN_PROCESS = 4


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        shape = plan_shape(options.slices, options.hosts_per_slice, options.mib, options.leaves, 1)
        one_bytes = shape.slices * shape.state_bytes
        in_all = _COPIES_ON_RAMDISK + _COPIES_IN_PROCESS
        machine.require_room(options.ramdisk, _COPIES_ON_RAMDISK * one_bytes, in_all * one_bytes)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    about = machine.facts()
    rounds: dict[str, list[report.Run]] = {variant: [] for variant in options.variants}
    try:
        for number in range(options.rounds):
            # Nobody is always first, nor always after the same other.
            turn = number % len(options.variants)
            for variant in options.variants[turn:] + options.variants[:turn]:
                print(f"round {number + 1} of {options.rounds}: {variant}", file=sys.stderr)
                rounds[variant].append(run_variant(variant, shape, options))
    except RoundFailed as failure:
        print(f"continuous: {failure}", file=sys.stderr)
        return 1
    summaries = report.summarize(rounds)
    expected = report.expectations(summaries, options.mtbf_h, options.chips)
    print(_text(options, shape, about, summaries, expected))
    document = _document(options, shape, about, rounds, summaries, expected)
    (options.out / "continuous.json").write_text(json.dumps(document, indent=1) + "\n")
    _plot(summaries, expected, options.out / "continuous.png")
    print(f"\nWritten to {options.out / 'continuous.json'} and continuous.png")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.continuous", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--slices", type=positive, default=2)
    parser.add_argument("--hosts-per-slice", type=positive, default=1)
    parser.add_argument("--mib", type=positive, default=64, help="size of one copy of the state")
    parser.add_argument("--leaves", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=1000, help="measured steps of each run")
    parser.add_argument(
        "--warm-up-steps",
        type=positive,
        default=100,
        help="steps before the measured ones, with saves",
    )
    parser.add_argument(
        "--every", type=positive, default=100, help="interval of fixed saving, in steps"
    )
    parser.add_argument(
        "--minimum-interval-s", type=_seconds, default=0.0, help="between continuous saves"
    )
    parser.add_argument(
        "--device-ms", type=_seconds, default=20.0,
        help="part of each step during which the host's cores are idle",
    )  # fmt: skip
    parser.add_argument(
        "--training-cores", type=positive,
        help="number of cores for training; saves have the others (default: all are shared)",
    )  # fmt: skip
    parser.add_argument(
        "--mtbf-h", type=_hours, default=[1.0, 3.0, 12.0, 24.0],
        help="mean times between failures of the job, with commas",
    )  # fmt: skip
    parser.add_argument(
        "--chips", type=positive, default=128, help="for chip hours; two v5p-128 slices have 128"
    )
    parser.add_argument(
        "--variants", type=_variants, default=list(VARIANTS), help=f"of {','.join(VARIANTS)}"
    )
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"))
    parser.add_argument(
        "--storage",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="directory in which the persistent tier is made and removed",
    )
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for each run")
    parser.add_argument("--date", help="date to record in the JSON")
    return parser


def _seconds(text: str) -> float:
    if not ((value := float(text)) >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is no finite number of 0 or more")
    return value


def _hours(text: str) -> list[float]:
    hours = [_seconds(part) for part in text.split(",")]
    if min(hours) == 0:
        raise argparse.ArgumentTypeError("a mean time between failures is above 0")
    return hours


def _variants(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"{unknown} not in {list(VARIANTS)}")
    return list(dict.fromkeys(names))


def run_variant(variant: str, shape: Shape, options: argparse.Namespace) -> report.Run:
    """Train once, in fresh processes with fresh directories. Raises RoundFailed."""
    with (
        tempfile.TemporaryDirectory(prefix="eckpt-study-", dir=options.ramdisk) as ram,
        tempfile.TemporaryDirectory(prefix="eckpt-study-", dir=options.storage) as storage,
    ):
        root = Path(ram).resolve()
        orders = Orders(
            variant=variant,
            shape=shape,
            every_n_steps=options.every,
            minimum_interval_s=options.minimum_interval_s,
            warm_up_steps=options.warm_up_steps,
            measured_steps=options.steps,
            device_s=options.device_ms / 1e3,
            persistent_dir=str(Path(storage).resolve()),
            results_dir=str(root / "results"),
            training_cores=options.training_cores,
        )
        Path(orders.results_dir).mkdir()
        orders.write(root / "orders.json")
        spec = JobSpec(
            command=(sys.executable, str(_WORKER), str(root / "orders.json")),
            slices=shape.slices,
            hosts_per_slice=shape.hosts_per_slice,
            devices_per_host=1,
            local_root=root / "ramdisks",
            log_dir=root / "logs",
            env={"PYTHONPATH": str(ROOT)},
        )
        results = [orders.result_path(index) for index in range(shape.process_count)]
        run = run_life(spec, 0, results, variant, options.timeout_s)
    _require_saves(variant, run)
    return run


def _require_saves(variant: str, run: report.Run) -> None:
    """Raise RoundFailed unless all processes restored the newest complete step."""
    restored = {process["restored_step"] for process in run}
    newest = max((int(step) for process in run for step in process["whole_s"]), default=None)
    if variant != OFF and restored != {newest}:
        raise RoundFailed(f"{variant}: restored {restored}, the newest whole step is {newest}")
    if variant == OFF and newest is not None:
        raise RoundFailed(f"{variant}: saved step {newest}")


def _text(
    options: argparse.Namespace,
    shape: Shape,
    about: Mapping[str, Any],
    summaries: Mapping[str, report.Summary],
    expected: Sequence[report.Expectation],
) -> str:
    lines = [
        f"{shape.slices} slices of {shape.hosts_per_slice} hosts,"
        f" {shape.state_bytes / 2**20:g} MiB of state, {options.rounds} rounds of"
        f" {options.steps} steps, fixed saves every {options.every} steps,"
        f" cores for training: {options.training_cores or 'all'};"
        f" {about['cores']} cores, {about['cpu']}, {about['memory']}",
        "",
        report.study_table(summaries),
        "",
        f"At the median interval, on {options.chips} chips:",
        "",
        report.loss_table(expected),
    ]
    if (load := about["load_average_at_start"]) > machine.IDLE_LOAD:
        lines += ["", f"Not an idle machine (load average {load:.1f} at start): do not publish."]
    return "\n".join(lines)


def _document(
    options: argparse.Namespace,
    shape: Shape,
    about: Mapping[str, Any],
    rounds: Mapping[str, Sequence[report.Run]],
    summaries: Mapping[str, report.Summary],
    expected: Sequence[report.Expectation],
) -> dict[str, Any]:
    settings = (
        *("rounds", "steps", "warm_up_steps", "every", "minimum_interval_s"),
        *("device_ms", "training_cores", "chips"),
    )
    return {
        "schema_version": 1,
        "date": options.date,
        "machine": about,
        "job": dataclasses.asdict(shape) | {"state_bytes": shape.state_bytes},
        "settings": {name: getattr(options, name) for name in settings},
        "summary": {name: dataclasses.asdict(value) for name, value in summaries.items()},
        "expected": [
            dataclasses.asdict(value) | {"loss": value.loss._asdict()} for value in expected
        ],
        "rounds": {
            name: [dataclasses.asdict(report.figures(run)) for run in runs]
            for name, runs in rounds.items()
        },
    }


def _plot(
    summaries: Mapping[str, report.Summary], expected: Sequence[report.Expectation], path: Path
) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    intervals, increases, losses = figure.subplots(1, 3)
    saving = {v: s for v, s in summaries.items() if s.median_interval_steps is not None}
    intervals.barh(list(saving), [s.median_interval_steps or 0.0 for s in saving.values()])
    intervals.set_title("median interval, steps")
    compared = {v: s for v, s in saving.items() if s.step_increase is not None}
    increases.barh(list(compared), [100 * (s.step_increase or 0.0) for s in compared.values()])
    increases.set_title("longer steps, %")
    increases.tick_params(labelleft=False)
    for bars in (intervals, increases):
        bars.invert_yaxis()  # in the order of the table
    for variant in saving:
        rows = [e for e in expected if e.variant == variant]
        losses.plot(
            [e.mtbf_h for e in rows], [e.chip_hours_per_day for e in rows], "o-", label=variant
        )
    losses.set(title="lost to failures, chip hours per day", xlabel="MTBF, h", yscale="log")
    if saving:
        losses.legend(fontsize="small")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
