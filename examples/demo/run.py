"""The demonstration: an undisturbed run, the same run with a fault, and the comparison.

Nothing here imports JAX: only the processes of the job do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from rich.console import Console

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extras.event_log import LoggedEvent, LogTail
from emergency_ckpt.json_decoders import decoder_of
from emergency_ckpt.tools.launch.job import JobSpec
from emergency_ckpt.tools.signals import handling
from emergency_ckpt.types import PERSISTENT
from examples.demo import demo_report
from examples.demo.display import show
from examples.demo.results import ProcessResult, merge_results
from examples.demo.scenarios import ALL, Scenario, ScenarioJob, choose
from examples.faults.faults import parse_fault
from examples.faults.injection import FaultySupervisor

RUN_TIMEOUT_S = 300.0
HANG_TIMEOUT_S = 120
REFRESH_S = 0.1
_MARKER = ".eckpt_demo"
_ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of ``python -m examples.demo``.

    Attributes:
      scenario: a name of ``scenarios.SCENARIOS``, or ``all``.
      out: directory for the summary, the plot and the runs' files; created if missing.
      job: size and save intervals.
      ram: directory that represents the RAM of all hosts; None: a temporary one on a tmpfs.
      json_only: print the summary as JSON and nothing else.
    """

    scenario: str
    out: Path
    job: ScenarioJob = dataclasses.field(default_factory=ScenarioJob)
    ram: Path | None = None
    json_only: bool = False


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demonstration and write its results. Blocks; some minutes by default.

    Returns 0 only when every scenario recovered from the expected tier and ended with the bits of
    the undisturbed run.

    Raises:
      ConfigError: the options are invalid; nothing was started.
    """
    scenarios = choose(options.scenario, options.job)
    runs_dir = _fresh_runs_dir(options.out)
    started_s = time.monotonic()
    faulty: dict[str, demo_report.FinishedRun] = {}
    verdicts: list[demo_report.ScenarioVerdict] = []
    with _ram_directory(options.ram) as ram:
        baseline = run_once(options, runs_dir, ram, console, "undisturbed", None)
        stopped: SystemExit | None = None
        for scenario in scenarios if baseline.finished else ():
            try:
                record = run_once(options, runs_dir, ram, console, scenario.name, scenario)
            except SystemExit as error:
                stopped = error
                break
            faulty[scenario.name] = record
            verdicts.append(
                demo_report.decide_verdict(scenario, options.job.process_count, baseline, record)
            )
    if stopped is not None and not verdicts:
        raise stopped
    if not verdicts:
        console.print(
            "the undisturbed run did not finish, so there is nothing to compare", style="red"
        )
        return 1
    demo_report.plot_losses(options.out / "loss.png", baseline, faulty)
    demo_report.write_page(options.out / "report.html", baseline, faulty)
    document = demo_report.summary_document(
        verdicts,
        seconds=time.monotonic() - started_s,
        every=options.scenario == ALL,
        not_run=[scenario.name for scenario in scenarios if scenario.name not in faulty],
    )
    demo_report.write_summary(options.out / "summary.json", document)
    _tell(options, console, verdicts, document)
    if stopped is not None:
        raise stopped
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def run_once(
    options: DemoOptions,
    runs_dir: Path,
    ram: Path,
    console: Console,
    name: str,
    scenario: Scenario | None,
) -> demo_report.FinishedRun:
    """Run and show the job ``name``, with the scenario's fault if there is one. Main thread only.

    SIGINT and SIGTERM end the job, and then this program, by SystemExit.
    """
    job = options.job
    directory = runs_dir / name
    results_dir = directory / "results"
    results_dir.mkdir(parents=True)
    subtitle = "no fault" if scenario is None else scenario.title
    faults = [] if scenario is None else [parse_fault(scenario.fault(job))]
    spec = _job_spec(job, directory, ram / name, max_restarts=len(faults))
    supervisor = FaultySupervisor(spec, faults)
    tail = LogTail(spec.event_log)
    events: list[LoggedEvent] = []
    stopped: list[int] = []

    def stop(signum: int) -> None:
        stopped.append(signum)
        supervisor.stop(signum)

    started_s = time.monotonic()
    with (
        show(console, name, job.steps, subtitle=subtitle, quiet=options.json_only) as observe,
        handling((signal.SIGINT, signal.SIGTERM), stop),
        ThreadPoolExecutor(1, "supervisor") as pool,
    ):
        running = pool.submit(supervisor.run, RUN_TIMEOUT_S)
        try:
            over = False
            while not over:
                over = bool(wait([running], REFRESH_S).done)  # before reading: nothing is missed
                fresh = tail.read_new()
                events += fresh
                observe(fresh)
        finally:
            supervisor.stop()  # without effect once it is over
    if stopped:
        raise SystemExit(128 + stopped[0])
    result = running.result()
    seconds = time.monotonic() - started_s
    if result.error is not None and not options.json_only:
        console.print(str(result.error), style="red", markup=False)
    finished = result.error is None
    results = _read_results(results_dir) if finished else []
    return demo_report.FinishedRun(
        finished=finished and len(results) == job.process_count,
        events=events,
        digest=merge_results(results) if results else None,
        corpus=frozenset(each.corpus for each in results),
        seconds=seconds,
    )


def _job_spec(job: ScenarioJob, directory: Path, local_root: Path, *, max_restarts: int) -> JobSpec:
    """Return the spec of a job with a restart for each fault, and none for other failures."""
    command = [sys.executable, "-m", "examples.demo.train"]
    command += ["--steps", str(job.steps), "--seed", str(job.seed)]
    command += ["--local-every", str(job.local_every)]
    command += ["--persistent-every", str(job.persistent_every)]
    command += ["--persistent-dir", str(directory / PERSISTENT)]
    command += ["--result-dir", str(directory / "results")]
    return JobSpec(
        command=tuple(command),
        slices=job.slices,
        hosts_per_slice=job.hosts_per_slice,
        devices_per_host=1,
        local_root=local_root,
        log_dir=directory / "logs",
        env={
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            "ECKPT_OBSERVERS": f"hang({HANG_TIMEOUT_S})",
        },
        max_restarts=max_restarts,
        keep_ram="never",
    )


def _read_results(directory: Path) -> list[ProcessResult]:
    decode = decoder_of(ProcessResult).decode
    return [decode(path.read_bytes()) for path in sorted(directory.glob("*.json"))]


def _fresh_runs_dir(out: Path) -> Path:
    """Return an empty ``out/runs``; only files of an earlier demo are removed."""
    runs_dir = out.absolute() / "runs"
    if runs_dir.exists():
        if not (runs_dir / _MARKER).exists():
            raise ConfigError(
                [f"{runs_dir} was not made by the demo; give another --out"], target="the demo"
            )
        shutil.rmtree(runs_dir)
    runs_dir.mkdir(parents=True)
    (runs_dir / _MARKER).touch()
    return runs_dir


@contextlib.contextmanager
def _ram_directory(chosen: Path | None) -> Generator[Path]:
    """Yield a new directory for the ramdisks, on tmpfs if available; removed at the end."""
    shared_memory = Path("/dev/shm")  # noqa: S108 - a private directory is created in it
    parent = chosen
    if parent is None and os.access(shared_memory, os.W_OK | os.X_OK):
        parent = shared_memory
    if parent is not None:
        parent = parent.absolute()
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="eckpt-demo-", dir=parent) as directory:
        yield Path(directory)


def _tell(
    options: DemoOptions,
    console: Console,
    verdicts: Sequence[demo_report.ScenarioVerdict],
    document: demo_report.Summary,
) -> None:
    if options.json_only:
        console.print_json(json.dumps(document))
        return
    console.print(demo_report.summary_table(verdicts))
    for verdict in verdicts:
        for problem in verdict.problems:
            line = f"{verdict.summary['scenario']}: {problem}"
            console.print(line, style="red", markup=False, soft_wrap=True)
    written = (str(options.out / name) for name in ("summary.json", "loss.png", "report.html"))
    console.print("  ".join(written), markup=False, soft_wrap=True)
