"""One life of a job: its processes, forked, watched by their journals, signalled and ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from soak_program import Order, live

from emergency_ckpt.tools.launch.process_set import ReservedPort

POLL_S = 0.003
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that forked it has ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class RunningLife:
    """The processes of one life. Its own process must have one thread, for it forks."""

    def __init__(self, orders: Sequence[Order], log_dir: Path, port: ReservedPort) -> None:
        self.orders = list(orders)
        self.started_s = time.monotonic()
        self._port = port
        self._read: list[int] = [0] * len(orders)
        self.journals: list[list[dict[str, Any]]] = [[] for _ in orders]
        self.statuses: dict[int, int] = {}
        self.pids: list[int] = []
        for order in self.orders:
            log = log_dir / f"life_{order.life:03d}_process_{order.process}.log"
            pid = os.fork()
            if pid == 0:
                end_with_parent()
                live(order, log)
            self.pids.append(pid)

    @property
    def running(self) -> list[int]:
        return [p for p in range(len(self.pids)) if p not in self.statuses]

    def poll(self) -> None:
        """Read what the journals have got, and learn which processes have ended."""
        for process in self.running:
            pid, status = os.waitpid(self.pids[process], os.WNOHANG)
            if pid:
                self.statuses[process] = os.waitstatus_to_exitcode(status)
        for process, order in enumerate(self.orders):
            with contextlib.suppress(FileNotFoundError), order.journal.open("rb") as file:
                file.seek(self._read[process])
                data = file.read()
                end = data.rfind(b"\n") + 1
                self._read[process] += end
                self.journals[process] += [json.loads(line) for line in data[:end].splitlines()]

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Poll until it is so; False after ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.poll()
            if until():
                return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)

    def signal(self, processes: Iterable[int], number: int) -> None:
        for process in processes:
            if process not in self.statuses:
                os.kill(self.pids[process], number)

    def dump_stacks(self) -> None:
        """Let what still runs write its stacks to its log."""
        self.signal(range(len(self.pids)), signal.SIGUSR1)
        time.sleep(1.0)

    def end(self) -> None:
        """Kill what still runs, and reap it."""
        self.signal(range(len(self.pids)), signal.SIGKILL)
        assert self.wait(lambda: not self.running, 30.0), "a process survived SIGKILL"
        self._port.close()

    def notes(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        """(process, line) of each line of that name."""
        return [
            (process, line)
            for process, lines in enumerate(self.journals)
            for line in lines
            if line["e"] == name
        ]

    def noted(self, name: str) -> set[int]:
        return {process for process, _ in self.notes(name)}

    @property
    def trained(self) -> int:
        """Steps that the process which is furthest has trained in this life."""
        return max(sum(line["e"] == "trained" for line in lines) for lines in self.journals)

    def steps_of(self, name: str) -> set[int]:
        return {line["step"] for _, line in self.notes(name)}

    def is_settled(self) -> bool:
        """Every process has restored, failed, or ended."""
        over = self.noted("restored") | self.noted("process.raised") | set(self.statuses)
        return len(over) == len(self.pids)
