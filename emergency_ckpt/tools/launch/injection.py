"""The injection of the requested faults, each once, in order."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from emergency_ckpt.extras.progress import NO_STEP
from emergency_ckpt.tools.launch.faults import Fault, new_indices
from emergency_ckpt.tools.launch.job_layout import JobLayout
from emergency_ckpt.tools.launch.process_set import ProcessSet


class FaultInjector:
    """The faults of a job. Only the first that has not fired can fire.

    After a deadly fault no other fires in that life: the next one waits for the restart.
    """

    def __init__(self, faults: Sequence[Fault], emit: Callable[..., None]) -> None:
        self._left = deque(faults)
        self._emit = emit
        self._lost_hosts: set[int] = set()
        self._renumberings: list[str] = []
        self._wake_times_s: list[tuple[float, tuple[int, ...]]] = []
        self.struck = False

    @property
    def left(self) -> tuple[Fault, ...]:
        """Return the faults that have not fired."""
        return tuple(self._left)

    def begin_life(self, topology: JobLayout) -> Mapping[int, int]:
        """Prepare for new processes; return the steps at which some of them wait."""
        self.struck = False
        self._wake_times_s.clear()
        return self._holds(topology)

    def poll(self, processes: ProcessSet) -> None:
        """Fire the faults that are due. Never blocks."""
        self._wake(processes)
        while self._left and not self.struck and _due(self._left[0], processes):
            self._fire(self._left.popleft(), processes)
            for process, step in self._holds(processes.topology).items():
                processes.hold_at((process,), step)

    def end_life(self, topology: JobLayout) -> tuple[tuple[int, ...], JobLayout]:
        """Return the hosts whose RAM the next life has lost, and its layout.

        Call it after all processes of this life have ended.
        """
        lost_hosts = tuple(sorted(self._lost_hosts))
        for permute in self._renumberings:
            topology = topology.renumbered(new_indices(permute, topology))
        self._lost_hosts.clear()
        self._renumberings.clear()
        return lost_hosts, topology

    def _fire(self, fault: Fault, processes: ProcessSet) -> None:
        targets = fault.target.processes(processes.topology)
        hosts = processes.topology.hosts_of(targets)
        step = max(processes.steps)
        processes.signal(targets, signal.Signals[f"SIG{fault.signal}"])
        if fault.exact:
            processes.hold_at(targets, NO_STEP)
        if fault.resume_after_s is not None:
            self._wake_times_s.append((time.monotonic() + fault.resume_after_s, targets))
        if fault.lose_ram:
            self._lost_hosts.update(hosts)
        if fault.permute is not None:
            self._renumberings.append(fault.permute)
        self.struck = fault.deadly
        self._emit("fault.fired", fault=str(fault), step=step, processes=targets, hosts=hosts)

    def _holds(self, topology: JobLayout) -> dict[int, int]:
        if not self._left or not self._left[0].exact or self.struck:
            return {}
        fault = self._left[0]
        return dict.fromkeys(fault.target.processes(topology), fault.step)

    def _wake(self, processes: ProcessSet) -> None:
        now_s = time.monotonic()
        due = [targets for wake_s, targets in self._wake_times_s if wake_s <= now_s]
        self._wake_times_s = [entry for entry in self._wake_times_s if entry[0] > now_s]
        for targets in due:
            processes.signal(targets, signal.SIGCONT)


def _due(fault: Fault, processes: ProcessSet) -> bool:
    if not fault.exact:
        return max(processes.steps) >= fault.step
    targets = fault.target.processes(processes.topology)
    return all(processes.steps[index] >= fault.step for index in targets)
