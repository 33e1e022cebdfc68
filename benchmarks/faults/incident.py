"""One incident: a job that saves is killed, meets a fault while it is down, and starts again."""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks.common import contenders, warm
from benchmarks.common.job import plan_shape
from benchmarks.faults.worker import SAVES_AFTER, Orders, entries
from emergency_ckpt.tools.launch.job import JobSpec
from emergency_ckpt.tools.launch.logs import log_tail
from emergency_ckpt.tools.launch.process_set import ProcessSet

NEWEST, OLDER, NOTHING, REFUSED, WRONG, HUNG = (
    "newest", "older", "nothing", "refused", "wrong", "hung",
)  # fmt: skip
OUTCOMES = {
    NEWEST: "the newest step that had been complete and is there, or a newer one",
    OLDER: "an older step",
    NOTHING: "the checkpointer found nothing and would begin anew",
    REFUSED: "a process of each of two starts ended with an error",
    WRONG: "other bytes than were saved, or different steps on two processes",
    HUNG: "a start did not end in its time",
}

_SLICES, _MIB, _LEAVES = 3, 3, 8
_FIRST_KILL, _LAST_STEP = 9, 13
"""Two steps are in storage when the job is killed."""
_LONGEST_DELAY_S = 0.3
"""Of a kill, after a step began: a save of either takes less."""
_STARTS = 2
_POLL_S = 0.005


class Outcome(NamedTuple):
    """What became of one incident.

    Attributes:
      what: one of ``OUTCOMES``.
      due: the step that had to come back at the least.
      step: the step that was restored.
      text: the above in words, with the end of a log after an error.
    """

    contender: str
    fault: str
    what: str
    due: int
    step: int | None
    text: str


class Place(NamedTuple):
    """Where incidents happen: a tmpfs, a directory for what a failure leaves, seconds for a life,
    the process to fork others from.
    """

    ramdisk: Path
    out: Path
    timeout_s: float
    warm: Path


class Down(NamedTuple):
    """The job between two lives."""

    hosts: Sequence[Path]
    storage: Path
    random: random.Random


class Fault(NamedTuple):
    """What happens between two lives.

    Attributes:
      happens: changes the ramdisks or storage.
      spoilt_steps: how many of storage's newest steps it may spoil; None: RAM still has the newest.
    """

    happens: Callable[[Down], None]
    spoilt_steps: int | None = None


def _nothing(down: Down) -> None:
    del down


def _lose(hosts: Sequence[Path]) -> None:
    for host in hosts:
        shutil.rmtree(host)
        host.mkdir(mode=0o700)


def _lose_slice(down: Down) -> None:
    _lose([down.random.choice(down.hosts)])


def _files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file() and p.stat().st_size > 0)


def _newest_of(storage: Path) -> Path:
    return max((p for p in storage.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))


def _flip(path: Path, choices: random.Random) -> None:
    with path.open("r+b") as file:
        place = choices.randrange(path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << choices.randrange(8)]))


def _cut(path: Path, choices: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(choices.randrange(path.stat().st_size))


def _remove(path: Path, choices: random.Random) -> None:
    del choices
    path.unlink()


def _in_ram(damage: Callable[[Path, random.Random], None]) -> Callable[[Down], None]:
    def happens(down: Down) -> None:
        files = [files for host in down.hosts if (files := _files(host))]
        damage(down.random.choice(down.random.choice(files)), down.random)

    return happens


def _in_storage(damage: Callable[[Path, random.Random], None]) -> Callable[[Down], None]:
    def happens(down: Down) -> None:
        _lose(down.hosts)
        damage(down.random.choice(_files(_newest_of(down.storage))), down.random)

    return happens


FAULTS: Mapping[str, Fault] = {
    "killed": Fault(_nothing),
    "a slice's RAM lost": Fault(_lose_slice),
    "a bit flipped in a file in RAM": Fault(_in_ram(_flip)),
    "a file in RAM cut": Fault(_in_ram(_cut)),
    "a file in RAM removed": Fault(_in_ram(_remove)),
    "all RAM lost": Fault(lambda down: _lose(down.hosts), 0),
    "all RAM lost, a bit flipped in storage": Fault(_in_storage(_flip), 1),
    "all RAM lost, a file in storage cut": Fault(_in_storage(_cut), 1),
    "all RAM lost, a file in storage removed": Fault(_in_storage(_remove), 1),
}
"""One host of three, chosen at random, has the damaged file in RAM; in storage the newest step."""


def run(contender: str, fault: str, choices: random.Random, place: Place) -> Outcome:
    """Run the job twice, or three times where the second ends with an error. Blocks.

    RuntimeError, with a log, when the first life does not come to its kill.
    """
    shape = plan_shape(_SLICES, 1, _MIB, _LEAVES, timed_saves=1)
    with tempfile.TemporaryDirectory(prefix="eckpt-faults-", dir=place.ramdisk) as scratch:
        root = Path(scratch).resolve()
        for name in ("storage", "journals"):
            (root / name).mkdir()
        orders = Orders(contender, shape, str(root / "storage"), str(root / "journals"), _LAST_STEP)
        orders.write(root / "orders.json")
        script = Path(__file__).with_name("worker.py")
        spec = JobSpec(
            command=(*warm.command(place.warm, script), str(root / "orders.json")),
            slices=_SLICES,
            hosts_per_slice=1,
            devices_per_host=1,
            local_root=root / "ramdisks",
            log_dir=root / "logs",
            env={"PYTHONPATH": str(ROOT)},
        )
        complete = _first_life(spec, orders, choices, place.timeout_s)
        hosts = [spec.ramdisk(host) for host in range(_SLICES)]
        kind = FAULTS[fault]
        kind.happens(Down(hosts, root / "storage", choices))
        due = max(complete)
        if kind.spoilt_steps is not None:
            stored = sorted(s for s in complete if s % contenders.STORED_EVERY == 0)
            due = stored[-1 - kind.spoilt_steps]
        what, step, text = REFUSED, None, ""
        for start in range(1, 1 + _STARTS):
            what, step, text = _start(spec, orders, start, due, place.timeout_s)
            if what != REFUSED:
                break
    return Outcome(contender, fault, what, due, step, text)


def _first_life(
    spec: JobSpec, orders: Orders, choices: random.Random, timeout_s: float
) -> set[int]:
    """Run the job until its kill; return the steps that had been complete on all processes."""
    at, delay_s = choices.randint(_FIRST_KILL, _LAST_STEP), choices.uniform(0, _LONGEST_DELAY_S)
    deadline_s = time.monotonic() + timeout_s
    with ProcessSet(spec) as processes:
        while min(processes.steps) < at:
            if processes.poll() or time.monotonic() > deadline_s:
                log = log_tail(spec.log_path(0, 0))
                raise RuntimeError(f"{orders.contender}: no process may end before the kill\n{log}")
            time.sleep(_POLL_S)
        time.sleep(delay_s)
        processes.end(grace_s=0)
    journals = [entries(orders.journal(0, process)) for process in range(_SLICES)]
    return set.intersection(
        *({entry["complete"] for entry in journal if "complete" in entry} for journal in journals)
    )


def _start(
    spec: JobSpec, orders: Orders, life: int, due: int, timeout_s: float
) -> tuple[str, int | None, str]:
    """Run a later life; return its outcome, the restored step and words."""
    deadline_s = time.monotonic() + timeout_s
    hung = False
    with ProcessSet(spec, restart_count=life) as processes:
        while processes.running and not hung:
            if any(ended.returncode != 0 for ended in processes.poll()):
                break
            hung = time.monotonic() > deadline_s
            time.sleep(_POLL_S)
        processes.end(grace_s=0)
    journals = [entries(orders.journal(life, process)) for process in range(_SLICES)]
    restored = [e for journal in journals for e in journal if "restored" in e]
    log = "\n".join(log_tail(spec.log_path(life, process)) for process in range(_SLICES))
    return judge(journals, restored, due, hung=hung, log=log)


def judge(
    journals: Sequence[Sequence[Mapping[str, Any]]],
    restored: Sequence[Mapping[str, Any]],
    due: int,
    *,
    hung: bool,
    log: str,
) -> tuple[str, int | None, str]:
    """Return the outcome of a start by what its processes wrote down. Pure."""
    steps = {entry["restored"] for entry in restored}
    if len(steps) > 1 or any(not entry.get("right", True) for entry in restored):
        return WRONG, None, f"restored {sorted(map(str, steps))}: {list(restored)}"
    saves = [sum("complete" in entry for entry in journal) for journal in journals]
    step = next(iter(steps), None)
    whole = len(restored) == len(journals)
    if whole and step is None:
        return NOTHING, None, f"nothing, and step {due} was due"
    if whole and min(saves) == SAVES_AFTER:
        what = NEWEST if step >= due else OLDER
        return what, step, f"step {step}, {due} was due"
    if hung:
        return HUNG, step, f"hung; step {due} was due\n{log}"
    return REFUSED, step, f"ended; step {due} was due\n{log}"
