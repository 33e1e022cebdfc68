"""The display of a running demo: a live picture on a terminal, plain lines elsewhere.

``RunTimeline`` turns events into a picture and messages; it has no clock and writes nothing.
``show`` is the only function that prints.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from emergency_ckpt.core.wording import size_text
from emergency_ckpt.event_log.records import LoggedEvent
from emergency_ckpt.types import PERSISTENT

KEPT_MESSAGES = 14
KEPT_DECISIVE = 12
_FEWEST_RECENT = 4
STEPS_PER_MESSAGE = 10
MESSAGE_LIMIT_CHARS = 300

_TELLING = ("tier", "holder", "shard", "reason", "detail", "text")

_STYLES = {"fault": "bold red", "good": "bold green", "save": "cyan", "plain": ""}


@dataclasses.dataclass(frozen=True)
class Message:
    """One line for people. ``style`` is a key of the colours used on a terminal."""

    time_s: float
    text: str
    style: str = "plain"


@dataclasses.dataclass
class ProcessView:
    """One process by its last event. ``saved_step`` is in its own RAM, 0 for none."""

    slice_index: int
    status: str = "starting"
    step: int = 0
    loss: float | None = None
    saved_step: int = 0


class RunTimeline:
    """The picture of one run, made from its events in the order of their times."""

    def __init__(self, title: str, steps: int, *, subtitle: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self.steps = steps
        self.life = 0
        self.step = 0
        self.start_s: float | None = None
        self.now_s = 0.0
        self.hosts: list[int] = []
        self.processes: dict[int, ProcessView] = {}
        self.recent: deque[Message] = deque(maxlen=KEPT_MESSAGES)
        self.decisive: list[Message] = []
        self._untaken: list[Message] = []
        self._said: set[tuple[object, ...]] = set()

    def observe(self, event: LoggedEvent) -> None:
        """Apply one event. Unknown names are ignored."""
        if self.start_s is None:
            self.start_s = event.time_s
        self.now_s = max(self.now_s, event.time_s)
        if event.process is None:
            self._observe_job(event)
        elif event.life >= self.life:
            self._observe_process(event, event.process)

    def take_messages(self) -> list[Message]:
        """Return the messages since the last call."""
        taken, self._untaken = self._untaken, []
        return taken

    def shown(self) -> list[Message]:
        """Return the messages for a panel; fault and recovery stay in it."""
        old = [message for message in self.decisive if message not in self.recent]
        room = max(_FEWEST_RECENT, KEPT_MESSAGES - len(old))
        return [*old, *list(self.recent)[-room:]]

    def _say(self, event: LoggedEvent, text: str, style: str = "plain") -> None:
        message = Message(event.time_s - (self.start_s or 0.0), text, style)
        self.recent.append(message)
        if style in ("fault", "good") and len(self.decisive) < KEPT_DECISIVE:
            self.decisive.append(message)
        self._untaken.append(message)

    def _say_once(self, event: LoggedEvent, key: object, text: str, style: str = "plain") -> None:
        """Add one message for an event that several processes report, at the first of them."""
        mark = (event.life, event.name, key)
        if mark not in self._said:
            self._said.add(mark)
            self._say(event, text, style)

    def _observe_job(self, event: LoggedEvent) -> None:
        fields = event.fields
        if event.name == "life.started":
            self.life = event.life
            self.step = 0
            self.hosts = list(fields["host_of_process"])
            self.processes.clear()
            order = f", numbered {self.hosts}" if self.hosts != sorted(self.hosts) else ""
            self._say(event, f"life {event.life}: {len(self.hosts)} hosts start{order}")
        elif event.name == "fault.fired":
            hosts = _listed(fields["hosts"])
            self._say(event, f"FAULT at step {fields['step']}: hosts {hosts} are killed", "fault")
        elif event.name == "process.exited":
            self._observe_exit(event)
        elif event.name == "ram.lost":
            self._say(event, f"the RAM of hosts {_listed(fields['hosts'])} is lost", "fault")
        elif event.name == "job.restarting":
            self._say(event, "the launcher starts all processes again", "good")
        elif event.name == "job.finished":
            self._say(event, f"the job is done, in life {event.life}", "good")
        elif event.name == "job.failed":
            self._say(event, f"the job FAILED: {fields['reason']}", "fault")

    def _observe_exit(self, event: LoggedEvent) -> None:
        process, code = event.fields["process"], event.fields["returncode"]
        view = self.processes.get(process)
        if view is not None:
            view.status = "dead" if code else "finished"
        if code > 0:
            self._say(event, f"process {process} ended with exit status {code}", "fault")

    def _observe_process(self, event: LoggedEvent, process: int) -> None:
        view = self.processes.get(process)
        if view is None:
            view = self.processes[process] = ProcessView(event.slice or 0)
        react = _REACTIONS.get(event.name)
        if react is not None:
            react(self, view, event)

    def on_launched(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note that a process runs; it joins the others and compiles next."""
        view.status = "compiling"
        self._say_once(event, None, "the processes join and compile")

    def on_started(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note that the loop of a process begins."""
        view.status = "training"
        view.step = _whole(event.fields, "step")
        self._say_once(event, view.step, f"training from step {view.step}")

    def on_step(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note a finished step."""
        view.status = "training"
        view.step = _whole(event.fields, "step")
        view.loss = event.fields.get("loss")
        self.step = max(self.step, view.step)
        if view.step % STEPS_PER_MESSAGE == 0 and view.loss is not None:
            self._say_once(event, view.step, f"step {view.step:3d}  loss {view.loss:.4f}")

    def on_published(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note that a process has published a save in its own RAM."""
        view.saved_step = _whole(event.fields, "step")

    def on_complete(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note that a save is complete on all processes."""
        step = _whole(event.fields, "step")
        tier = "persistent tier" if event.name.startswith(PERSISTENT) else "RAM of its hosts"
        self._say_once(event, step, f"step {step} is complete in the {tier}", "save")

    def on_trouble(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note a failed save, a damaged copy, or an unusable step."""
        details = {key: event.fields[key] for key in _TELLING if event.fields.get(key)}
        text = " ".join(str(value)[:MESSAGE_LIMIT_CHARS] for value in details.values())
        step = event.fields.get("step")
        self._say_once(event, (step, text), f"{event.name}, step {step}: {text}", "fault")

    def on_restore_started(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note that a process begins a restore."""
        view.status = "restoring"
        if event.life:
            self._say_once(event, None, "restoring: collecting the inventories", "good")

    def on_prefetch_started(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note that a process restores in the background while it compiles."""
        view.status = "prefetching"
        if event.life:
            self._say_once(event, None, "prefetching while the step compiles", "good")

    def on_prefetched(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note that a process has prefetched the state to its devices."""
        step, seconds = _whole(event.fields, "step"), event.fields.get("seconds", 0.0)
        text = f"process {event.process} has prefetched step {step} in {seconds:.2f} s"
        self._say(event, text, "good")

    def on_planned(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note that the leader has chosen a step."""
        step, tier = _whole(event.fields, "step"), event.fields.get("tier")
        self._say_once(event, step, f"plan: step {step} is complete in the {tier} tier", "good")

    def on_restore_finished(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note that a process has restored its state, or that there is none."""
        fields = event.fields
        step = fields.get("step")
        if step is None:
            return
        view.step = view.saved_step = _whole(fields, "step")
        view.status = "restored"
        sources = (
            ("bytes_local", "own RAM"),
            ("bytes_peer", "peers"),
            ("bytes_persistent", "persistent tier"),
        )
        moved = [
            f"{size_text(_whole(fields, field))} {name}"
            for field, name in sources
            if _whole(fields, field)
        ]
        seconds = fields.get("seconds", 0.0)
        text = f"process {event.process} restored step {view.step} in {seconds:.2f} s"
        saved = fields.get("overlapped_seconds", 0.0)
        if saved:
            text += f" (the prefetch saved {saved:.2f} s)"
        self._say(event, f"{text}: {', '.join(moved)}", "good")

    def on_finished(self, view: ProcessView, event: LoggedEvent) -> None:
        """Note that a process has finished."""
        view.status = "finished"


_REACTIONS: dict[str, Callable[[RunTimeline, ProcessView, LoggedEvent], None]] = {
    "train.launched": RunTimeline.on_launched,
    "train.started": RunTimeline.on_started,
    "train.step": RunTimeline.on_step,
    "train.finished": RunTimeline.on_finished,
    "save.published": RunTimeline.on_published,
    "save.complete": RunTimeline.on_complete,
    "save.failed": RunTimeline.on_trouble,
    "save.incomplete": RunTimeline.on_trouble,
    "persistent.complete": RunTimeline.on_complete,
    "persistent.failed": RunTimeline.on_trouble,
    "prefetch.started": RunTimeline.on_prefetch_started,
    "prefetch.finished": RunTimeline.on_prefetched,
    "restore.started": RunTimeline.on_restore_started,
    "restore.planned": RunTimeline.on_planned,
    "restore.rejected": RunTimeline.on_trouble,
    "restore.finished": RunTimeline.on_restore_finished,
    "restore.quarantined": RunTimeline.on_trouble,
    "divergence": RunTimeline.on_trouble,
}


def _whole(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else 0


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def message_line(message: Message) -> str:
    """Return the message as printed without a terminal."""
    return f"[{message.time_s:6.1f} s] {message.text}"


def render(timeline: RunTimeline) -> RenderableType:
    """Return the picture for a terminal."""
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(width=14)
    bar.add_column(ratio=1)
    bar.add_row(
        f"step {timeline.step}/{timeline.steps}",
        ProgressBar(total=timeline.steps, completed=timeline.step),
    )
    processes = Table(expand=True, pad_edge=False, box=None)
    for heading in ("slice", "process", "host", "status", "step", "saved in RAM", "loss"):
        processes.add_column(heading)
    for index, view in sorted(timeline.processes.items()):
        processes.add_row(
            str(view.slice_index),
            str(index),
            str(timeline.hosts[index]) if index < len(timeline.hosts) else "?",
            Text(view.status, style="red" if view.status == "dead" else "green"),
            str(view.step),
            str(view.saved_step or "-"),
            "-" if view.loss is None else f"{view.loss:.4f}",
        )
    messages = [
        Text(message_line(each), style=_STYLES[each.style], no_wrap=True, overflow="ellipsis")
        for each in timeline.shown()
    ]
    elapsed_s = timeline.now_s - (timeline.start_s or timeline.now_s)
    return Panel(
        Group(bar, processes, Text(), *messages),
        title=f"{timeline.title}, life {timeline.life}, {elapsed_s:.0f} s",
        subtitle=timeline.subtitle,
    )


Observer = Callable[[Iterable[LoggedEvent]], None]


@contextmanager
def show(timeline: RunTimeline, console: Console, *, quiet: bool = False) -> Generator[Observer]:
    """Feed and display ``timeline`` during this context; yields the function that takes events.

    On a terminal the picture is redrawn in place; elsewhere each message is a plain line. With
    ``quiet`` nothing is printed.
    """
    if quiet:
        yield _plain_observer(timeline, None)
    elif not console.is_terminal:
        heading = " - ".join(filter(None, (timeline.title, timeline.subtitle)))
        console.print(f"== {heading}", markup=False, highlight=False, soft_wrap=True)
        yield _plain_observer(timeline, console)
    else:
        with Live(render(timeline), console=console, auto_refresh=False) as live:

            def redraw(events: Iterable[LoggedEvent]) -> None:
                for event in events:
                    timeline.observe(event)
                live.update(render(timeline), refresh=True)

            yield redraw


def _plain_observer(timeline: RunTimeline, console: Console | None) -> Observer:
    def observe(events: Iterable[LoggedEvent]) -> None:
        for event in events:
            timeline.observe(event)
        for message in timeline.take_messages():
            if console is not None:
                console.print(message_line(message), markup=False, highlight=False, soft_wrap=True)

    return observe
