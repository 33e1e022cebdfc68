"""``eckpt demo``: lose a slice, recover from the RAM of peers, and compare the bits."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.cli.arguments import seed
from emergency_ckpt.tools.demo.run import DemoOptions, run_demo
from emergency_ckpt.tools.demo.scenarios import ALL, SCENARIOS, ScenarioJob

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]

# Imported by the job's processes; checked here so that the error is not only in their logs.
_NEEDED_MODULES = ("grain", "optax", "plotly")


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of ``demo``."""
    parser = subparsers.add_parser(
        "demo",
        help="train, lose a slice, recover from peers, compare with an undisturbed run",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--scenario", choices=[*SCENARIOS, ALL], default="slice-loss")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="results go here")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--slices", type=int, default=2)
    parser.add_argument("--hosts-per-slice", type=int, default=2)
    parser.add_argument("--local-every", type=int, default=5, help="steps between RAM saves")
    parser.add_argument("--persistent-every", type=int, default=25)
    parser.add_argument(
        "--ram",
        type=Path,
        help="directory for all ramdisks; a temporary one in /dev/shm if not given",
    )
    parser.add_argument(
        "--json-only", action="store_true", help="print the summary as JSON and nothing else"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demonstration; return 0 only when every scenario recovered and is equal bit for bit.

    Raises:
      ConfigError: the options do not fit together, or a needed package is not installed.
    """
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
