"""Runs core/restore/scenarios: a bug report about a restore can be written as one of them.

A file is a list of blocks: lines of commands, ``----``, the full expected output, a blank line.
Lines that begin with ``#`` explain. ``ECKPT_REWRITE=1`` writes the actual output into the files:
read the difference before you commit it.

  job slices=2 hosts=2 [rows=8]   a new job; w is sharded over a slice's hosts, b is replicated
  save step=40 incarnation=a [by=0,1] [complete] [empty]
  lose process=1 | slice=0 | all  RAM is lost
  restart [slices=N hosts=N] [ids=3,2,1,0] [rows=8]   next life; ids: process index of machine i
  serve process=1                 its RAM stays readable through a server, the process starts empty
  unpublish process=1 step=40     the manifest is missing
  truncate process=1 step=40      the manifest is there, but its contents cannot be read
  drop-host-state owner=1 step=40 [process=3]
  quarantine process=1 step=40 [leaf=w] | persistent=25
  persistent step=25 processes=4 [empty]
  expect leaf=w [dtype=..] [shape=8,2] [gone]   change what the restore expects
  plan [step=40] [remap] [no-host-state]
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from planner_world import Layout, Machine, PlannerWorld, with_sets
from process_parts import Part, parts_of, shards_text

from emergency_ckpt.core.restore.inventory import (
    HeldHostState,
    HeldTensors,
    PersistentStep,
    Quarantined,
)
from emergency_ckpt.core.restore.plan_types import NoPlan, Rejection, RestorePlan
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.types import LeafSpec

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
FLAGS = {"complete", "empty", "all", "remap", "no-host-state", "gone"}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class Scenario:
    """The state that the commands of one file work on."""

    def __init__(self) -> None:
        self.world = PlannerWorld(Layout(1, 1))
        self.leaves: dict[str, LeafSpec] = {}

    def run(self, line: str) -> list[str]:
        name, *words = line.split()
        flags = {word for word in words if "=" not in word}
        assert flags <= FLAGS, f"unknown words in {line!r}"
        args = dict(word.split("=", 1) for word in words if "=" in word)
        method = getattr(self, f"do_{name.replace('-', '_')}")
        return method(args, flags) or []

    def do_job(self, args: dict[str, str], flags: set[str]) -> None:
        layout = Layout(int(args["slices"]), int(args["hosts"]), int(args.get("rows", 8)))
        self.world, self.leaves = PlannerWorld(layout), layout.leaves()

    def do_restart(self, args: dict[str, str], flags: set[str]) -> None:
        old = self.world.layout
        layout = Layout(
            int(args.get("slices", old.slices)),
            int(args.get("hosts", old.hosts)),
            int(args.get("rows", old.rows)),
        )
        self.world.restart(layout, numbers(args["ids"]) if "ids" in args else None)
        self.leaves = layout.leaves()

    def do_save(self, args: dict[str, str], flags: set[str]) -> None:
        by = numbers(args["by"]) if "by" in args else None
        step, life = int(args["step"]), args["incarnation"]
        self.world.save(step, life, by, empty="empty" in flags, complete="complete" in flags)

    def do_lose(self, args: dict[str, str], flags: set[str]) -> None:
        layout = self.world.layout
        lost = range(layout.process_count)
        if "process" in args:
            lost = numbers(args["process"])
        elif "slice" in args:
            lost = [p for p in lost if layout.topology.slice_of[p] == int(args["slice"])]
        else:
            assert "all" in flags
        for process in lost:
            self.world.lose(process)

    def do_serve(self, args: dict[str, str], flags: set[str]) -> None:
        self.world.serve(int(args["process"]))

    def tensors(self, args: dict[str, str]) -> tuple[Machine, HeldTensors]:
        machine = self.world.machine(int(args["process"]))
        (held,) = [t for t in machine.tensors if t.save.step == int(args["step"])]
        return machine, held

    def do_unpublish(self, args: dict[str, str], flags: set[str]) -> None:
        machine, held = self.tensors(args)
        machine.tensors.remove(held)

    def do_truncate(self, args: dict[str, str], flags: set[str]) -> None:
        machine, held = self.tensors(args)
        machine.tensors.remove(held)
        machine.tensors.append(HeldTensors(held.save, "truncated"))

    def do_drop_host_state(self, args: dict[str, str], flags: set[str]) -> None:
        owner, step = int(args["owner"]), int(args["step"])
        machines = self.world.machines
        if "process" in args:
            machines = [self.world.machine(int(args["process"]))]

        def dropped(state: HeldHostState) -> bool:
            return state.owner == owner and state.save.step == step

        assert any(dropped(state) for machine in machines for state in machine.host_states)
        for machine in machines:
            machine.host_states = [s for s in machine.host_states if not dropped(s)]

    def do_quarantine(self, args: dict[str, str], flags: set[str]) -> None:
        if "persistent" in args:
            digest = f"persistent/{args['persistent']}"
            self.world.quarantined.add(Quarantined("persistent", digest))
            return
        _, held = self.tensors(args)
        contents, shard = self.world.manifests[held.digest], None
        if "leaf" in args:
            paths = [leaf.path for leaf in contents.leaves]
            (shard,) = [i for i, s in enumerate(contents.shards) if paths[s.leaf] == args["leaf"]]
        holder = f"process/{args['process']}"
        self.world.quarantined.add(Quarantined(holder, held.digest, shard))

    def do_persistent(self, args: dict[str, str], flags: set[str]) -> None:
        step = PersistentStep(int(args["step"]), int(args["processes"]), "empty" not in flags)
        self.world.persistent.append(step)

    def do_expect(self, args: dict[str, str], flags: set[str]) -> None:
        path = args["leaf"]
        if "gone" in flags:
            del self.leaves[path]
            return
        spec = self.leaves.get(path, LeafSpec(path, "float32", ()))
        if "dtype" in args:
            spec = msgspec.structs.replace(spec, dtype=args["dtype"])
        if "shape" in args:
            spec = msgspec.structs.replace(spec, global_shape=tuple(numbers(args["shape"])))
        self.leaves[path] = spec

    def do_plan(self, args: dict[str, str], flags: set[str]) -> list[str]:
        """What the processes report of their sets of shards leads to the same choice.

        The choice may name fewer manifests with a shard: those that are whole for some process.
        """
        targets, inventory = self.world.layout.targets(), self.world.inventory()
        lines, by_sets = (
            self.render(
                plan_restore(
                    item,
                    targets,
                    self.leaves,
                    requested_step=int(args["step"]) if "step" in args else None,
                    host_state_remap="remap" in flags,
                    needs_host_state="no-host-state" not in flags,
                )
            )
            for item in (inventory, with_sets(inventory, targets, self.leaves))
        )
        verdicts = (
            [line for line in rendered if not line.startswith("  process ")]
            for rendered in (by_sets, lines)
        )
        assert next(verdicts) == next(verdicts)
        return lines

    def render(self, outcome: RestorePlan | NoPlan) -> list[str]:
        lines: list[str] = []
        if isinstance(outcome, RestorePlan):
            life = f" of incarnation {outcome.save.incarnation}" if outcome.save else ""
            tier = "local" if outcome.save else "persistent"
            count = outcome.host_state_count
            states = "no host states" if count is None else f"host states of {count}"
            lines.append(f"restore step {outcome.step}{life} from the {tier} tier, {states}")
            inventory = self.world.inventory()
            parts = parts_of(outcome, inventory, self.world.layout.targets())
            counts = {d: len(contents.shards) for d, contents in inventory.manifests.items()}
            for process, part in parts.items():
                lines += [f"  process {process}: {text}" for text in render_process(part, counts)]
        else:
            step = "" if outcome.step is None else f", step {outcome.step}"
            lines.append(f"no plan: {outcome.kind}{step}")
            lines += [f"  mismatch {line}" for line in outcome.mismatches]
            lines += [f"  missing {line}" for line in outcome.missing]
            if outcome.saved_count is not None:
                lines.append(f"  saved {outcome.saved_count}, now {outcome.process_count}")
            lines += [f"  note {note}" for note in outcome.notes]
        return [*lines, *(f"  rejected {render_rejection(item)}" for item in outcome.rejected)]


def render_rejection(item: Rejection) -> str:
    life = f" of incarnation {item.incarnation}" if item.incarnation else ""
    return f"step {item.step}{life}, {item.tier}: {item.reason}"


def render_process(part: Part, counts: Mapping[str, int]) -> list[str]:
    lines = [
        f"own {read.digest} {shards_text(read.shards, counts[read.digest])},"
        f" else {' '.join(read.alternates) or 'nobody'}"
        for read in part.local
    ]
    lines += [
        f"fetch {group.digest} {shards_text(group.shards, counts[group.digest])}"
        f" from {' else '.join(group.sources)}"
        for group in part.fetch
    ]
    lines += [
        f"host state {state.owner} from {' else '.join(state.sources)}"
        for state in part.host_states
    ]
    return lines or ["nothing to do"]


def run_file(text: str) -> str:
    """The file with the actual outputs in place of the expected ones."""
    scenario = Scenario()
    written: list[str] = []
    output: list[str] = []
    skipping = False
    for line in text.splitlines():
        if skipping:
            if line.strip():
                continue
            skipping = False
        written.append(line)
        if line == "----":
            written += output
            output, skipping = [], True
        elif line.strip() and not line.startswith("#"):
            output += scenario.run(line)
    assert not output, "the last commands have no ---- behind them"
    return "\n".join(written) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_has_the_expected_output(path: Path) -> None:
    expected = path.read_text()
    actual = run_file(expected)
    if os.environ.get("ECKPT_REWRITE") == "1":
        path.write_text(actual)
    else:
        assert actual == expected


def test_scenarios_are_found() -> None:
    assert len(SCENARIOS) >= 15
