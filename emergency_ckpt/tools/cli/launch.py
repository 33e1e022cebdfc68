"""``eckpt launch``: a job of simulated hosts on this machine, restarted when it dies."""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.tools.cli.arguments import seconds
from emergency_ckpt.tools.cli.output import Printer, tell
from emergency_ckpt.tools.launch.job import EventSink, JobSpec, LineSink
from emergency_ckpt.tools.launch.supervisor import Supervisor
from emergency_ckpt.tools.signals import handling

_SHOWN_EVENTS = (
    "fault.fired",  # this event and the next one by examples.faults
    "ram.lost",
    "life.ended",
    "job.restarting",
    "job.finished",
)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EPILOG = """\
The program reads its place in the job with emergency_ckpt.tools.job_environment.JobEnvironment
.from_environ(). A checkpointer reports a step once the loop names the next one; a program
without a checkpointer calls emergency_ckpt.extras.progress.report_step after each step.
"""


EXAMPLE = "eckpt launch --slices 2 --hosts-per-slice 2 -- python train.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``launch``."""
    parser.usage = "eckpt launch [options] -- PROGRAM [ARGUMENT ...]"
    parser.description = (
        "A torchrun for one machine, for tests and demonstrations: starts one process per simulated"
        " host, and all of them again when one dies; a configuration error ends the job at once."
        " On a cluster its engine starts them; see deploy/."
    )
    parser.epilog = _EPILOG
    parser.add_argument("--slices", type=int, default=2, help="data-parallel replicas")
    parser.add_argument("--hosts-per-slice", type=int, default=2, help="processes of a slice")
    parser.add_argument("--devices-per-host", type=int, default=1, help="CPU devices of a process")
    parser.add_argument(
        "--local-root",
        type=Path,
        help="directory of all ramdisks (default: a new one on /dev/shm, removed at the end)",
    )
    parser.add_argument("--keep-ram", action="store_true", help="never remove the ramdisks")
    parser.add_argument(
        "--log-dir",
        type=Path,
        help="made for this user alone where it is missing; default: a temporary directory, kept"
        " only after a failure",
    )
    parser.add_argument("--max-restarts", type=int, default=5, help="then the job has failed")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=JobSpec.grace_s,
        help="seconds from SIGTERM to SIGKILL when the job is stopped, also for the save on"
        " preemption: more than the job's preemption_grace_s. A second signal ends all at once",
    )
    parser.add_argument("--timeout-s", type=seconds, help="end the job after this time")
    parser.add_argument("--quiet", action="store_true", help="do not show what the processes print")


def run(
    args: argparse.Namespace, supervisor_of: Callable[[JobSpec, EventSink], Supervisor] = Supervisor
) -> int:
    """Run the job; return its exit code. SIGINT, SIGTERM and SIGHUP end it, where not ignored.

    ``supervisor_of``: returns the supervisor of a job; ``examples.faults`` gives its own.
    """
    printer = Printer()
    spec = _job_spec(args, lambda line: printer.pass_on(line, sys.stdout))
    supervisor = supervisor_of(spec, lambda event: _show(event, printer))
    # Logs may hold what other users must not read. A named directory may be that of an earlier job.
    spec.log_dir.mkdir(mode=0o700, parents=True, exist_ok=args.log_dir is not None)
    try:
        with handling(_STOP_SIGNALS, supervisor.stop), printer:
            printer.tell(
                f"eckpt: ramdisks in {spec.local_root}, logs in {spec.log_dir}", sys.stderr
            )
            result = supervisor.run(args.timeout_s)
    finally:
        if args.log_dir is None and not any(spec.log_dir.iterdir()):  # the job did not start
            spec.log_dir.rmdir()
    if result.error is not None:
        _say(str(result.error))
    if spec.local_root.exists():
        _say(f"ramdisks are kept in {spec.local_root}")
    if not printer.has_printed_all:
        _say(f"not all lines were printed; logs are kept in {spec.log_dir}")
    elif args.log_dir is None and result.exit_code == 0:
        shutil.rmtree(spec.log_dir, ignore_errors=True)
    return result.exit_code


def _job_spec(args: argparse.Namespace, echo: LineSink) -> JobSpec:
    """Return the job that the command line describes; ``echo`` is for one that is not quiet."""
    log_dir: Path | None = args.log_dir
    if log_dir is None:
        log_dir = Path(tempfile.gettempdir()) / f"eckpt-logs-{secrets.token_hex(4)}"
    local_root: Path | None = args.local_root
    keep_ram = "never" if local_root is None else "after-failure"
    if local_root is None:
        local_root = Path("/dev/shm") / f"eckpt-{secrets.token_hex(4)}"  # noqa: S108 - random name
    return JobSpec(
        command=tuple(args.program),
        slices=args.slices,
        hosts_per_slice=args.hosts_per_slice,
        devices_per_host=args.devices_per_host,
        local_root=local_root.absolute(),
        log_dir=log_dir.absolute(),
        max_restarts=args.max_restarts,
        grace_s=args.grace_s,
        keep_ram="always" if args.keep_ram else keep_ram,
        echo=None if args.quiet else echo,
    )


def _show(event: LoggedEvent, printer: Printer) -> None:
    if event.name in _SHOWN_EVENTS:
        fields = {"restart_count": event.life, **event.fields}
        details = " ".join(
            f"{key}={f'{value:.3g}' if isinstance(value, float) else value}"
            for key, value in fields.items()
        )
        printer.tell(f"eckpt: {event.name} {details}", sys.stderr)


def _say(message: str) -> None:
    tell(f"eckpt: {message}", sys.stderr)
