"""Lose a slice, be preempted, lose all RAM: recover each time, and compare the bits.

python -m examples.demo --out demo_out
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.tools.cli.output import print_line
from examples.demo.run import DemoOptions, run_demo
from examples.demo.scenarios import ALL, SCENARIOS, ScenarioJob

# Imported by the job's processes; checked here so that the error is not only in their logs.
_NEEDED_MODULES = ("grain", "optax", "matplotlib")


def positive(text: str) -> int:
    """Return a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def seed(text: str) -> int:
    """Return a seed of random numbers, of 32 bits."""
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 32 bits")
    return value


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line; SystemExit where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Trains without a fault and once with each: a lost slice, a preemption notice,"
        " and the loss of all RAM. Compares the bits of each run with the undisturbed one's.",
    )
    parser.add_argument("--scenario", choices=[*SCENARIOS, ALL], default=ALL, help="what is lost")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="results go here")
    parser.add_argument("--steps", type=positive, default=60, help="steps of training")
    parser.add_argument("--seed", type=seed, default=0, help="of model and data")
    parser.add_argument("--slices", type=positive, default=2, help="data-parallel replicas")
    parser.add_argument("--hosts-per-slice", type=positive, default=2, help="processes of a slice")
    parser.add_argument("--local-every", type=positive, default=5, help="steps between RAM saves")
    parser.add_argument(
        "--persistent-every", type=positive, default=25, help="steps between saves to storage"
    )
    parser.add_argument(
        "--ram",
        type=Path,
        help="directory for all ramdisks; a temporary one in /dev/shm if not given",
    )
    parser.add_argument(
        "--json-only", action="store_true", help="print the summary as JSON and nothing else"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the demonstration; return 0 only when every scenario recovered and is equal bit for bit.

    2: the options do not fit together, or a package is missing. 1: a directory cannot be used.
    """
    try:
        return _run(parsed(words))
    except ConfigError as error:
        print_line(str(error), sys.stderr)
        return 2
    except (CheckpointError, OSError) as error:
        print_line(str(error), sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    missing = [name for name in _NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        hint = "install emergency-ckpt[demo]"
        raise ConfigError([f"{', '.join(missing)} not installed; {hint}"], target="the demo")
    job = ScenarioJob(
        slices=args.slices,
        hosts_per_slice=args.hosts_per_slice,
        steps=args.steps,
        local_every=args.local_every,
        persistent_every=args.persistent_every,
        seed=args.seed,
    )
    options = DemoOptions(
        scenario=args.scenario,
        out=args.out,
        job=job,
        ram=args.ram,
        json_only=args.json_only,
    )
    return run_demo(options, Console())


if __name__ == "__main__":
    sys.exit(main())
