"""The lines of a running demo, and below them on a terminal a bar of its steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from emergency_ckpt.core.wording import size_text
from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.tools.report.lives import text, whole
from emergency_ckpt.types import PERSISTENT

STEPS_PER_MESSAGE = 10

_FAULT, _GOOD, _SAVE, _PLAIN = "bold red", "bold green", "cyan", ""
_TELLING = ("tier", "holder", "shard", "reason", "detail", "text")
_SOURCES = {
    "bytes_local": "own RAM",
    "bytes_peer": "peers",
    "bytes_persistent": "persistent tier",
}

Observer = Callable[[Iterable[LoggedEvent]], None]


@contextmanager
def show(
    console: Console, name: str, steps: int, *, subtitle: str = "", quiet: bool = False
) -> Generator[Observer]:
    """Print the lines of the run ``name``; yields the function that takes its events by time.

    On a terminal a bar below the lines shows the newest of ``steps`` steps, until the end of this
    context. With ``quiet`` nothing is printed.
    """
    if quiet:
        yield lambda events: None
        return
    columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(None))
    life, life_step = 0, 0
    start_s: float | None = None
    said: set[tuple[int, str, str]] = set()
    with Progress(
        *columns,
        TextColumn("{task.description}"),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
        expand=True,
    ) as progress:
        task = progress.add_task(f"{name}, life 0", total=steps)

        def print_line(line: str, style: str = _PLAIN) -> None:
            progress.console.print(Text(line, style), soft_wrap=True)

        def observe(events: Iterable[LoggedEvent]) -> None:
            nonlocal life, life_step, start_s
            for event in events:
                start_s = event.time_s if start_s is None else start_s
                if event.process is not None and event.life < life:
                    continue  # late words of a dead life
                if event.name == "life.started":
                    life, life_step = event.life, 0
                elif event.name == "train.loss":
                    life_step = max(life_step, _step(event))
                style, once, line_of = _LINES.get(event.point, (_PLAIN, False, _no_line))
                line = line_of(event)
                mark = (event.life, event.point, line)
                if line and not (once and mark in said):
                    said.add(mark)
                    print_line(f"[{event.time_s - start_s:6.1f} s] {line}", style)
            description = f"{name}, life {life}"
            progress.update(task, completed=life_step, description=description, refresh=True)

        print_line("== " + " - ".join(filter(None, (name, subtitle))))
        yield observe


def _no_line(_: LoggedEvent) -> str:
    return ""


def _step(event: LoggedEvent) -> int:
    return whole(event, "step") or 0


def _hosts(fields: Mapping[str, Any]) -> str:
    return ", ".join(map(str, fields["hosts"]))


def _life_started(event: LoggedEvent) -> str:
    hosts = list(event.fields["host_of_process"])
    order = f", numbered {hosts}" if hosts != sorted(hosts) else ""
    return f"life {event.life}: {len(hosts)} hosts start{order}"


def _exited(event: LoggedEvent) -> str:
    process, code = event.fields["process"], event.fields["returncode"]
    return f"process {process} ended with exit status {code}" if code > 0 else ""


def _trained(event: LoggedEvent) -> str:
    step, loss = _step(event), event.fields.get("loss")
    is_told = step % STEPS_PER_MESSAGE == 0 and loss is not None
    return f"step {step:3d}  loss {loss:.4f}" if is_told else ""


def _complete(event: LoggedEvent) -> str:
    in_storage = event.name.startswith(PERSISTENT)
    tier = "persistent tier" if in_storage else "RAM of its hosts"
    return f"step {_step(event)} is complete in the {tier}"


def _trouble(event: LoggedEvent) -> str:
    told = " ".join(filter(None, (text(event, field) for field in _TELLING)))
    return f"{event.name}, step {event.fields.get('step')}: {told}"


def _restored(event: LoggedEvent) -> str:
    fields = event.fields
    if fields.get("step") is None:
        return ""
    line = f"process {event.process} restored step {_step(event)} in {fields['seconds']:.2f} s"
    moved = [
        f"{size_text(size)} {source}"
        for field, source in _SOURCES.items()
        if (size := whole(event, field))
    ]
    return f"{line}: {', '.join(moved)}"


_LINES: dict[str, tuple[str, bool, Callable[[LoggedEvent], str]]] = {
    "life.started": (_PLAIN, False, _life_started),
    "fault.fired": (
        _FAULT,
        False,
        lambda e: f"FAULT at step {e.fields['step']}: hosts {_hosts(e.fields)} are killed",
    ),
    "process.exited": (_FAULT, False, _exited),
    "ram.lost": (_FAULT, False, lambda e: f"the RAM of hosts {_hosts(e.fields)} is lost"),
    "job.restarting": (_GOOD, False, lambda _: "the launcher starts all processes again"),
    "job.finished": (_GOOD, False, lambda e: f"the job is done, in life {e.life}"),
    "job.failed": (_FAULT, False, lambda e: f"the job FAILED: {e.fields['reason']}"),
    "train.launched": (_PLAIN, True, lambda _: "the processes join and compile"),
    "train.started": (_PLAIN, True, lambda e: f"training from step {_step(e)}"),
    "train.loss": (_PLAIN, True, _trained),
    "save.complete": (_SAVE, True, _complete),
    "persistent.complete": (_SAVE, True, _complete),
    "restore.stage.started": (
        _GOOD,
        True,
        lambda e: "restoring: collecting the inventories" if e.life else "",
    ),
    "restore.stage.planned": (
        _GOOD,
        True,
        lambda e: f"plan: step {_step(e)} is complete in the {text(e, 'tier')} tier",
    ),
    "restore.finished": (_GOOD, False, _restored),
    "save.incomplete": (_FAULT, True, _trouble),
    "persistent.failed": (_FAULT, True, _trouble),
    "restore.rejected": (_FAULT, True, _trouble),
    "restore.quarantined": (_FAULT, True, _trouble),
    "divergence": (_FAULT, True, _trouble),
}
"""The line of each event: its style, whether it is printed once for all processes, and its text."""
