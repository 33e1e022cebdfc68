"""The demo's faults and the expected recovery from each. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.types import LOCAL, PERSISTENT, TierName

ALL = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScenarioJob:
    """Size and save intervals of the demo job. Steps count from 1; step 0 is the fresh state."""

    slices: int = 2
    hosts_per_slice: int = 2
    steps: int = 60
    local_every: int = 5
    persistent_every: int = 25
    seed: int = 0

    @property
    def process_count(self) -> int:
        """Processes, one per host."""
        return self.slices * self.hosts_per_slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """One fault and the expected recovery.

    Attributes:
      name: value of ``--scenario``.
      title: description for people.
      hit: targets of the fault and their losses, in the launcher's syntax.
      tier: the tier that the state must be restored from.
      needs_peers: True when bytes must come from other hosts' RAM.
      is_notice: the processes get a preemption notice and lose no step.
      min_slices: of the smallest suitable job.
    """

    name: str
    title: str
    hit: Callable[[ScenarioJob], str]
    tier: TierName = LOCAL
    needs_peers: bool = False
    is_notice: bool = False
    min_slices: int = 1

    def fault_step(self, job: ScenarioJob) -> int:
        """Return the step of the fault: some steps after the save that must survive it."""
        if self.is_notice:
            # JAX checks for notices once a second; enough steps must be left for that.
            return job.local_every + 3
        if self.tier == PERSISTENT:
            return job.persistent_every + 3 * job.local_every + 3
        return 4 * job.local_every + 3

    def fault(self, job: ScenarioJob) -> str:
        """Return the fault in the launcher's syntax; ``exact``, as runs are compared by step."""
        return f"step={self.fault_step(job)} {self.hit(job)} exact"

    def problems(self, job: ScenarioJob) -> list[str]:
        """Return why this scenario cannot be shown with ``job``; empty when it can."""
        found: list[str] = []
        if job.slices < self.min_slices:
            found.append(f"{self.name} needs {self.min_slices} slices, got {job.slices}")
        if job.steps <= self.fault_step(job):
            found.append(
                f"{self.name} strikes at step {self.fault_step(job)}, after the last of {job.steps}"
            )
        return found


def _last_slice(job: ScenarioJob) -> str:
    return f"kill=slice:{job.slices - 1} lose-ram"


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="slice-loss",
            title="a whole slice dies and its hosts come back with empty ramdisks",
            hit=_last_slice,
            needs_peers=True,
            min_slices=2,
        ),
        Scenario(
            name="preemption",
            title="one host is told to leave: all save one step, end, and resume at that step",
            hit=lambda job: f"kill=process:{job.process_count - 1} signal=TERM",
            is_notice=True,
        ),
        Scenario(
            name="all-ram-lost",
            title="every host comes back with an empty ramdisk: the persistent tier is left",
            hit=lambda job: "kill=all lose-ram",
            tier=PERSISTENT,
        ),
    )
}
"""Every scenario by name, in the order of ``all``."""


def choose(name: str, job: ScenarioJob) -> tuple[Scenario, ...]:
    """Return the scenario called ``name``, or all scenarios for ``all``.

    Raises:
      ConfigError: no such scenario, or the job is too small for it; lists every fault.
    """
    if name == ALL:
        chosen = tuple(SCENARIOS.values())
    elif name in SCENARIOS:
        chosen = (SCENARIOS[name],)
    else:
        raise ConfigError([f"no scenario {name}; there are {', '.join(SCENARIOS)} and {ALL}"])
    problems = [line for each in chosen for line in each.problems(job)]
    if problems:
        raise ConfigError(problems, target="the demo")
    return chosen
