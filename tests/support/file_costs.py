"""What each test file costs, and the two limits of a test without the mark ``process``.

Costs are CPU seconds (user and system) of the test process and of the children that it waited for,
since a busy machine changes them little, and seconds by the clock. The last figures of a whole run
are kept in ``tests/durations.json``; a file's growth is looked at beside that of all files, because
another machine is slower at all of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import pytest
import warm_start
from places import ROOT, TESTS

LAST_COSTS = TESTS / "durations.json"
GROWN_BY = 1.2
FLOOR_S = 2.0
"""Least growth that is no noise: files of a second vary by half of it."""
_STARTS = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of CPU, and seconds by the clock."""

    cpu_s: float = 0.0
    wall_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.cpu_s - other.cpu_s, self.wall_s - other.wall_s)

    @classmethod
    def so_far(cls) -> Cost:
        """Return what this process, its children and its forks have used, once waited for.

        Forks of the warm servers are children of the servers, so the kernel counts them there.
        """
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(each.ru_utime + each.ru_stime for each in used)
        return cls(own_s + warm_start.cpu_s(), time.monotonic())


Costs = dict[str, Cost]
"""By the path of a test file in the repository."""


def read_costs() -> Costs:
    """Return the costs that are kept in the repository."""
    if not LAST_COSTS.exists():
        return {}
    return {path: Cost(*cost) for path, cost in json.loads(LAST_COSTS.read_text()).items()}


def write_costs(costs: Mapping[str, Cost]) -> None:
    """Keep ``costs``; files that were not run keep theirs, and files that are gone lose them."""
    kept = {path: cost for path, cost in read_costs().items() if (ROOT / path).exists()}
    lines = [
        f'  "{path}": [{cost.cpu_s:.1f}, {cost.wall_s:.1f}]'
        for path, cost in sorted({**kept, **costs}.items())
    ]
    LAST_COSTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def grown(costs: Mapping[str, Cost], before: Mapping[str, Cost]) -> list[str]:
    """Return a line for each file whose CPU grew by a fifth more than that of all files."""
    ratios = [
        costs[path].cpu_s / before[path].cpu_s
        for path in costs.keys() & before.keys()
        if before[path].cpu_s >= 1
    ]
    of_all = statistics.median(ratios) if ratios else 1.0
    lines: list[str] = []
    for path, cost in sorted(costs.items()):
        expected_s = of_all * before.get(path, Cost()).cpu_s
        if cost.cpu_s > GROWN_BY * expected_s and cost.cpu_s - expected_s > FLOOR_S:
            lines.append(f"{path}: {expected_s:.1f} s before, now {cost.cpu_s:.1f} s of CPU")
    return lines


class FileCosts:
    """A plugin of pytest: sums up costs by file, and holds the two limits.

    Attributes:
      shows: ``print`` and ``write`` print them at the end; ``write`` keeps them too.
      most_cpu_s: of a test that starts no process: its call and the setup of fixtures of its own.
    """

    def __init__(self, shows: str | None, most_cpu_s: float) -> None:
        self.shows = shows
        self.most_cpu_s = most_cpu_s
        self.costs: Costs = {}
        self._wider = Cost()
        self._depth = 0
        self._begun = Cost()
        self._starts: list[str] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_numpys = arguments[:1] == ("lscpu",)  # numpy.testing of 2.0 runs it at its import
        if self._starts is not None and event in _STARTS and not is_numpys:
            self._starts.append(f"{event} {arguments[:2]}"[:200])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        begun = Cost.so_far()
        try:
            return (yield)
        finally:
            path = os.path.relpath(item.path, ROOT)
            self.costs[path] = self.costs.get(path, Cost()) + (Cost.so_far() - begun)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Leave fixtures that several tests share out of the cost of the test that is first."""
        if fixturedef.scope == "function":
            return (yield)
        begun = Cost.so_far()
        self._depth += 1
        try:
            return (yield)
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._wider += Cost.so_far() - begun

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._wider = Cost()
        self._begun = Cost.so_far()
        self._starts = None if _may_cost_more(item) else []
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        starts, self._starts = self._starts, None
        cpu_s = (Cost.so_far() - self._begun - self._wider).cpu_s
        if starts is not None:
            if starts:
                pytest.fail(
                    "it started a process, though nothing that it names in its source does: "
                    f"{starts[0]}; see tests/support/process_starts.py",
                    pytrace=False,
                )
            if cpu_s > self.most_cpu_s:
                pytest.fail(
                    f"it used {cpu_s:.1f} s of CPU, over {self.most_cpu_s} s for a test "
                    "that starts no process; make it cheaper, or mark it dear",
                    pytrace=False,
                )
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:  # a worker of xdist
            output["costs"] = {path: dataclasses.astuple(cost) for path, cost in self.costs.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._add(getattr(node, "workeroutput", {}).get("costs", {}).items())

    def _add(self, costs: Iterable[tuple[str, Iterable[float]]]) -> None:
        for path, cost in costs:
            self.costs[path] = self.costs.get(path, Cost()) + Cost(*cost)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.shows is None:
            return
        terminalreporter.section("cost of each file: seconds of CPU, seconds by the clock")
        for path, cost in sorted(self.costs.items(), key=lambda each: -each[1].cpu_s):
            terminalreporter.line(f"{cost.cpu_s:8.1f} {cost.wall_s:8.1f}  {path}")
        total = sum(self.costs.values(), Cost())
        terminalreporter.line(f"{total.cpu_s:8.1f} {total.wall_s:8.1f}  all, in tests")
        for line in grown(self.costs, read_costs()):
            terminalreporter.line(f"grown: {line}")
        if self.shows == "write":
            write_costs(self.costs)


def _may_cost_more(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("dear", "process", "slow"))
