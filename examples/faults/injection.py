"""A supervisor that injects the requested faults, each once, in order."""

from __future__ import annotations

import shutil
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extras.progress import NO_STEP
from emergency_ckpt.tools.launch.job import EventSink, JobSpec
from emergency_ckpt.tools.launch.process_set import ProcessSet
from emergency_ckpt.tools.launch.supervisor import Supervisor
from examples.faults.faults import Fault, check_faults, new_indices
from examples.faults.job_layout import JobLayout


class FaultySupervisor(Supervisor):
    """Runs one job, and injects faults. Only the first fault that has not fired can fire.

    After a deadly fault no other fault fires in that life: the next one waits for the restart.

    Attributes:
      has_steps: a process has reported a step.
    """

    def __init__(
        self, spec: JobSpec, faults: Sequence[Fault], on_event: EventSink | None = None
    ) -> None:
        """Check the faults; start no process.

        Raises:
          ConfigError: a fault names a process, host or slice that the job does not have.
        """
        super().__init__(spec, on_event)
        self._layout = JobLayout.first(spec.slices, spec.hosts_per_slice)
        problems = check_faults(faults, self._layout)
        if problems:
            raise ConfigError(problems, target="the faults")
        self._left = deque(faults)
        self.has_steps = False
        self._is_struck = False
        self._lost_hosts: set[int] = set()
        self._wake_times_s: list[tuple[float, tuple[int, ...]]] = []
        self._next_layout = self._layout

    @property
    def faults_left(self) -> tuple[Fault, ...]:
        """Return the faults that have not fired."""
        return tuple(self._left)

    def _begin_life(self) -> tuple[tuple[int, ...], Mapping[int, int]]:
        lost_hosts = tuple(sorted(self._lost_hosts))
        for host in lost_hosts:
            shutil.rmtree(self.spec.ramdisk(host))
        if lost_hosts:
            self._emit("ram.lost", hosts=lost_hosts)
        self._layout = self._next_layout
        self._is_struck = False
        self._lost_hosts.clear()
        self._wake_times_s.clear()
        return self._layout.host_of_process, self._holds()

    def _disturb(self, processes: ProcessSet) -> None:
        self.has_steps = self.has_steps or max(processes.steps) != NO_STEP
        self._wake(processes)
        while self._left and not self._is_struck and self._is_due(self._left[0], processes):
            self._fire(self._left.popleft(), processes)
            for process, step in self._holds().items():
                processes.hold_at((process,), step)

    def _fire(self, fault: Fault, processes: ProcessSet) -> None:
        targets = fault.target.processes(self._layout)
        hosts = self._layout.hosts_of(targets)
        step = max(processes.steps)
        processes.signal(targets, signal.Signals[f"SIG{fault.signal}"])
        if fault.exact:
            processes.hold_at(targets, NO_STEP)
        if fault.resume_after_s is not None:
            self._wake_times_s.append((time.monotonic() + fault.resume_after_s, targets))
        if fault.lose_ram:
            self._lost_hosts.update(hosts)
        if fault.permute is not None:
            new_index = new_indices(fault.permute, self._next_layout)
            self._next_layout = self._next_layout.renumbered(new_index)
        self._is_struck = fault.deadly
        self._emit("fault.fired", fault=str(fault), step=step, processes=targets, hosts=hosts)

    def _holds(self) -> dict[int, int]:
        """Return the step at which each target of the next fault waits, if that one is exact."""
        if not self._left or not self._left[0].exact or self._is_struck:
            return {}
        fault = self._left[0]
        return dict.fromkeys(fault.target.processes(self._layout), fault.step)

    def _is_due(self, fault: Fault, processes: ProcessSet) -> bool:
        if not fault.exact:
            return max(processes.steps) >= fault.step
        targets = fault.target.processes(self._layout)
        return all(processes.steps[index] >= fault.step for index in targets)

    def _wake(self, processes: ProcessSet) -> None:
        now_s = time.monotonic()
        due = [targets for wake_s, targets in self._wake_times_s if wake_s <= now_s]
        self._wake_times_s = [entry for entry in self._wake_times_s if entry[0] > now_s]
        for targets in due:
            processes.signal(targets, signal.SIGCONT)
