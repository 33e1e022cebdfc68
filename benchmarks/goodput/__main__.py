"""Simulate the goodput of a training job of up to 50,000 chips from measured costs.

    python -m benchmarks.compare && python -m benchmarks.goodput

Compares this checkpointer, Orbax's emergency manager and saves to storage only, each with the best
interval for its own costs, under random failures of processes, hosts and slices. The costs of a
save and a restore come from compare.json or from --costs. benchmarks/README.md states the model and
its assumptions; SETTINGS below states the source of each default.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.common.tables import markdown, number
from benchmarks.goodput.model import (
    DESIGNS,
    ORBAX,
    OURS,
    STORAGE_ONLY,
    MeasuredCosts,
    Result,
    Site,
    costs_of_comparison,
    evaluate,
)


class Setting(NamedTuple):
    """A field of ``Site``: its default, its meaning, and the source of the default."""

    default: float
    meaning: str
    source: str


_CHIP_MTBF_H = 54 * 24 / 419 * 16_384
_LLAMA = "Llama 3 report (2024), table 5: 419 unexpected interruptions in 54 days on 16,384 GPUs"
_V5P = "TPU v5p"

SETTINGS = {
    "chips_per_host": Setting(4, "chips of one host", _V5P),
    "chips_per_slice": Setting(1024, "largest slice; at least two slices are made", "assumed"),
    "state_gb": Setting(
        4860, "one copy of the state, GB", "405e9 parameters, float32 with two Adam moments"
    ),
    "device_gb_per_s": Setting(60, "device to host and back, per host, GB/s", f"{_V5P}, published"),
    "network_gb_per_s": Setting(25, "between slices, per host, GB/s", f"{_V5P}, published"),
    "storage_gb_per_s": Setting(
        25, "storage, whole job, each way, GB/s", "Cloud Storage, 200 Gbps default egress quota"
    ),
    "chip_mtbf_h": Setting(round(_CHIP_MTBF_H), "mean hours between failures of a chip", _LLAMA),
    "process_share": Setting(16, "failures that keep the host's RAM", f"{_LLAMA}; software"),
    "host_share": Setting(76, "failures that lose a host's RAM", f"{_LLAMA}; all others"),
    "slice_share": Setting(8, "failures that lose a slice's RAM", f"{_LLAMA}; switches, cables"),
    "down_s": Setting(
        120, "from a failure until a restore can begin", "HyperPod, published: under 2 minutes"
    ),
    "storage_at_least_every_s": Setting(
        3600, "longest interval of storage saves with a RAM tier", "assumed"
    ),
    "slowdown": Setting(
        0, "share by which training is slower during a save", "assumed; continuous.py"
    ),
    "days": Setting(30, "simulated time", "chosen"),
    "seeds": Setting(20, "simulations per row", "chosen"),
}

_SURVEY = "measured on 2 idle cores, jax 0.10.2, orbax-checkpoint 0.12.8, 2 slices of one host"
DEFAULT_COSTS = {
    ORBAX: MeasuredCosts(0.1045, 3.05, 5.95, 2.0**30, f"{_SURVEY}; middle of its range"),
}
CHIPS = (1024, 4096, 16_384, 32_768, 50_000)
MAX_CHIPS = 50_000
_MIB = 2**20


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        site = Site(**{name: getattr(options, name) for name in SETTINGS})
        costs = _costs(options)
        results = [
            evaluate(name, site, chips, costs[_paid_by(name)])
            for chips in options.chips
            for name in DESIGNS
        ]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(_text(site, costs, results))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "goodput.json").write_text(
        json.dumps(_document(options, site, costs, results), indent=1) + "\n"
    )
    _plot(results, options.out / "goodput.png")
    print(f"\nWritten to {options.out / 'goodput.json'} and goodput.png")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.goodput", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--chips", type=_sizes, default=list(CHIPS), help="sizes, with commas")
    parser.add_argument(
        "--compare",
        type=Path,
        default=Path("bench_out/compare.json"),
        help="measured costs; missing ones come from --costs or a default",
    )
    parser.add_argument(
        "--costs",
        type=_one_cost,
        action="append",
        default=[],
        metavar="NAME=STALL_S,SAVE_S,RESTORE_S,MIB",
        help="measured costs of one host with MIB of state; instead of --compare's",
    )
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument("--date", help="date to record in the JSON")
    for name, setting in SETTINGS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_least_one if name in _WHOLE else _amount if name in _MAY_BE_0 else _positive,
            default=setting.default,
            help=f"{setting.meaning} (default {setting.default:g}: {setting.source})",
        )
    return parser


_WHOLE = ("chips_per_host", "chips_per_slice", "seeds")
_MAY_BE_0 = ("process_share", "host_share", "slice_share", "down_s", "slowdown")


def _least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _amount(text: str) -> float:
    if not ((value := float(text)) >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is no finite number of 0 or more")
    return value


def _positive(text: str) -> float:
    if (value := _amount(text)) == 0:
        raise argparse.ArgumentTypeError("0 is too little")
    return value


def _sizes(text: str) -> list[int]:
    sizes = sorted({_least_one(size) for size in text.split(",")})
    if sizes[-1] > MAX_CHIPS:
        raise argparse.ArgumentTypeError(f"{sizes[-1]} is more than {MAX_CHIPS} chips")
    return sizes


def _one_cost(text: str) -> tuple[str, MeasuredCosts]:
    name, _, values = text.partition("=")
    if name not in (OURS, ORBAX):
        raise argparse.ArgumentTypeError(f"{name!r} is neither {OURS!r} nor {ORBAX!r}")
    try:
        stall_s, save_s, restore_s, mib = (float(value) for value in values.split(","))
        return name, MeasuredCosts(stall_s, save_s, restore_s, mib * _MIB, "given as a flag")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _paid_by(name: str) -> str:
    """Return the contender whose costs apply; with storage only, saves stall as Orbax's do."""
    return ORBAX if name == STORAGE_ONLY else name


def _costs(options: argparse.Namespace) -> dict[str, MeasuredCosts]:
    costs = dict(DEFAULT_COSTS)
    path: Path = options.compare
    if path.exists():
        try:
            costs |= costs_of_comparison(json.loads(path.read_text()), f"measured, {path.name}")
        except (LookupError, TypeError) as error:
            raise ValueError(f"{path} is not what compare.py writes: {error!r}") from error
    costs |= dict(options.costs)
    if OURS not in costs:
        raise ValueError(f"no costs of {OURS!r}: {path} is not there; run compare.py, or give"
                         f" --costs {OURS}=STALL_S,SAVE_S,RESTORE_S,MIB")  # fmt: skip
    return costs


def _text(site: Site, costs: Mapping[str, MeasuredCosts], results: Sequence[Result]) -> str:
    header = [
        "design", "chips", "MTBF, h", "RAM every, s", "storage every, s", "goodput, %",
        "first order, %", "lost per failure, chip h", "restored from RAM, %",
    ]  # fmt: skip
    measured = [["one host", "stall, s", "save, s", "restore, s", "MiB"]] + [
        [name, *(number(v) for v in (c.stall_s, c.save_s, c.restore_s, c.host_bytes / _MIB))]
        for name, c in costs.items()
    ]
    return "\n".join(
        [
            f"{site.days:g} days, {site.seeds} seeds, {site.state_gb:g} GB of state,"
            f" slices of up to {site.chips_per_slice} chips",
            "",
            markdown(measured),
            *(f"{name}: {c.source}" for name, c in costs.items()),
            "",
            markdown([header, *(_row(result) for result in results)]),
        ]
    )


def _row(result: Result) -> list[str]:
    local = result.design.local
    return [
        result.design.name,
        str(result.chips),
        number(result.mtbf_s / 3600),
        "-" if local is None else number(local.interval_s),
        number(result.design.persistent.interval_s),
        f"{100 * result.goodput:.2f} ± {100 * result.margin:.2f}",
        f"{100 * result.first_order:.2f}",
        number(result.lost_chip_hours_per_failure),
        "-" if local is None else f"{100 * result.ram_restore_share:.1f}",
    ]


def _document(
    options: argparse.Namespace,
    site: Site,
    costs: Mapping[str, MeasuredCosts],
    results: Sequence[Result],
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "date": options.date,
        "settings": {
            name: {
                "value": getattr(site, name),
                "meaning": setting.meaning,
                "source": setting.source
                if getattr(site, name) == setting.default
                else "given as a flag",
            }
            for name, setting in SETTINGS.items()
        },
        "costs": {name: dataclasses.asdict(cost) for name, cost in costs.items()},
        "results": [
            dataclasses.asdict(result)
            | {
                "design": result.design.name,
                "local": result.design.local and dataclasses.asdict(result.design.local),
                "persistent": dataclasses.asdict(result.design.persistent),
            }
            for result in results
        ],
    }


def _plot(results: Sequence[Result], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in DESIGNS:
        rows = [result for result in results if result.design.name == name]
        axes.errorbar(
            [row.chips for row in rows],
            [100 * row.goodput for row in rows],
            yerr=[100 * row.margin for row in rows],
            marker="o",
            capsize=3,
            label=name,
        )
    axes.set_xlabel("chips")
    axes.set_ylabel("goodput, %")
    axes.set_title("Simulated: time that goes into work that is kept")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
