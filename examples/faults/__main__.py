"""``python -m examples.faults``: ``eckpt launch`` with faults, from a checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.tools.cli import launch
from emergency_ckpt.tools.cli.output import print_line
from emergency_ckpt.tools.launch.job import EventSink, JobSpec
from emergency_ckpt.tools.launch.supervisor import NO_STEPS, Supervisor
from examples.faults.faults import parse_fault
from examples.faults.injection import FaultySupervisor

_EPILOG = """\
faults: words separated by spaces; several --fault options fire in order, each once
  step=23              when a process reports this step (required)
  kill=slice:1         process:3 | host:2 | hosts:1,3 | slice:1 | all (required)
  lose-ram             their ramdisks are empty in the next life
  permute=reverse      renumber the processes: reverse | swap-slices | seed:7 | 3,2,1,0
  signal=KILL          KILL | TERM | STOP | ABRT
  resume-after-s=1.5   with signal=STOP: continue them after this many seconds
  exact                hold the processes at exactly this step until the fault fires
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return its exit code. 2: wrong command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m examples.faults", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launch.add_arguments(parser)
    parser.usage = "python -m examples.faults [options] -- PROGRAM [ARGUMENT ...]"
    parser.epilog = _EPILOG
    parser.add_argument("--fault", action="append", default=[], metavar="WORDS")
    args = parser.parse_args(words[:at])
    args.program = words[at + 1 :]
    made: list[FaultySupervisor] = []

    def supervisor_of(spec: JobSpec, on_event: EventSink) -> Supervisor:
        made.append(FaultySupervisor(spec, faults, on_event))
        return made[0]

    try:
        faults = [parse_fault(text) for text in args.fault]
        code = launch.run(args, supervisor_of)
    except ConfigError as error:
        print_line(f"examples.faults: {error}", sys.stderr)
        return 2
    except (CheckpointError, OSError) as error:
        print_line(f"examples.faults: {error}", sys.stderr)
        return 1
    for fault in made[0].faults_left:
        print_line(f"examples.faults: fault '{fault}' never fired", sys.stderr)
    if made[0].faults_left and not made[0].has_steps:
        print_line(f"examples.faults: {NO_STEPS}", sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
