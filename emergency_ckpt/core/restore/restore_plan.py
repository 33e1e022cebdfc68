"""Choice of the step to restore, and of the source of every part for each process. Pure.

The newest complete step of both tiers wins; of two complete saves of one step, the one of the
later incarnation; a save in both tiers is taken from the local one. Parts of different saves are
never combined. Rolled-back saves (``core.timeline``) come last, or are excluded. Each newer save
that is passed over is reported with what it lacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from emergency_ckpt.core.boxes import covers, whole
from emergency_ckpt.core.restore.assignment import TensorPart, assign
from emergency_ckpt.core.restore.candidates import (
    PERSISTENT_HOLDER,
    SaveParts,
    UsableInventory,
    filter_inventory,
)
from emergency_ckpt.core.restore.host_state_plan import (
    HostStateAssignment,
    HostStates,
    choose_host_states,
)
from emergency_ckpt.core.restore.inventory import Inventory, PersistentStep, Quarantined
from emergency_ckpt.core.restore.leaves.leaf_comparison import compare_leaves
from emergency_ckpt.core.restore.plan_types import (
    MAX_REJECTIONS,
    FetchGroup,
    HostStateFetch,
    LocalRead,
    NoPlan,
    ProcessPlan,
    Rejection,
    RestorePlan,
    TargetSet,
    clip,
    few,
    selected,
)
from emergency_ckpt.core.restore.shard_holders import SaveTensors
from emergency_ckpt.core.timeline import is_plain
from emergency_ckpt.types import LOCAL, PERSISTENT, Box, Contents, LeafSpec

__all__ = [
    "FetchGroup",
    "HostStateFetch",
    "LocalRead",
    "NoPlan",
    "ProcessPlan",
    "Rejection",
    "RestorePlan",
    "TargetSet",
    "compare_leaves",
    "plan_restore",
    "selected",
]


@dataclass(frozen=True)
class _Request:
    """The arguments of ``plan_restore``."""

    targets: Mapping[int, TargetSet]
    leaves: Mapping[str, LeafSpec]
    host_state_remap: bool
    needs_host_state: bool


@dataclass(frozen=True)
class _Blocked:
    """A complete save that must not be restored: planning ends here."""

    no_plan: NoPlan


def plan_restore(
    inventory: Inventory,
    targets: Mapping[int, TargetSet],
    leaves: Mapping[str, LeafSpec],
    *,
    requested_step: int | None = None,
    host_state_remap: bool = False,
    needs_host_state: bool = True,
    takes_rolled_back: bool = False,
) -> RestorePlan | NoPlan:
    """Choose the step to restore and the source of every shard and host state.

    Deterministic, independent of the order of the inventory's parts, and total: it never raises
    for values of the right types.

    Two faults end the planning instead of leading to an older step: leaves that differ from the
    expected ones, and host states of another number of processes without a remap. Both come from
    the caller's configuration and most likely hold for every older step too, and an older step
    would silently discard training.

    Args:
      targets: shards that each process needs, for every process index 0..count-1. Share the tuple
        between processes with equal needs.
      leaves: every leaf of the expected state, by path.
      requested_step: restore this step or none.
      host_state_remap: the caller can convert the host states of any number of processes; where
        the numbers differ, every process gets all of them.
      needs_host_state: False to restore tensors alone.
      takes_rolled_back: a rolled-back save may be taken when there is no other.
    """
    request = _Request(targets, leaves, host_state_remap, needs_host_state)
    usable = filter_inventory(inventory)
    rejected: list[Rejection] = []
    candidates = list(_newest_first(usable, inventory, requested_step))
    if takes_rolled_back:
        candidates.sort(key=lambda each: bool(_rejection_reason(each, inventory)))
    for candidate in candidates:
        rejection_reason = _rejection_reason(candidate, inventory)
        if rejection_reason and not takes_rolled_back:
            rejected.append(_rejection(candidate, rejection_reason))
            continue
        if isinstance(candidate, PersistentStep):
            verdict = _decide_persistent(candidate, inventory, request)
        else:
            verdict = _decide_local(candidate, usable, inventory, request)
        if isinstance(verdict, str):
            rejected.append(_rejection(candidate, verdict))
            continue
        outcome = verdict.no_plan if isinstance(verdict, _Blocked) else verdict
        return msgspec.structs.replace(
            outcome,
            rejected=tuple(rejected[:MAX_REJECTIONS]),
            notes=tuple(clip(note) for note in (*usable.notes, *outcome.notes)),
        )
    return _nothing_left(usable, inventory, request, requested_step, rejected)


def _newest_first(
    usable: UsableInventory, inventory: Inventory, requested_step: int | None
) -> Iterator[SaveParts | PersistentStep]:
    """Yield the candidates in order of preference."""
    persistent = {item.step: item for item in sorted(inventory.persistent)}
    local: dict[int, list[SaveParts]] = {}
    for part in usable.saves:
        local.setdefault(part.save.step, []).append(part)
    for step in sorted(local.keys() | persistent.keys(), reverse=True):
        if requested_step is not None and step != requested_step:
            continue
        stored = persistent.get(step)
        for part in local.get(step, ()):  # the latest life first
            if stored is not None and _is_later(stored, part):
                yield stored
                stored = None
            yield part
        if stored is not None:
            yield stored


def _is_later(stored: PersistentStep, part: SaveParts) -> bool:
    """Return whether the stored step was saved after ``part``, which has the same number.

    The tensors of ``part`` itself, whose host states are gone in storage, are not.
    """
    saved = part.save.incarnation
    return stored.incarnation > saved and stored.tensors_of != saved


def _rejection_reason(candidate: SaveParts | PersistentStep, inventory: Inventory) -> str:
    """Return why the timeline excludes the candidate; empty when it does not."""
    if inventory.timeline is None:
        return ""
    if isinstance(candidate, PersistentStep):
        if not candidate.is_seen:
            return ""  # a look will tell
        return inventory.timeline.rejection_reason(candidate.step, candidate.incarnation)
    return inventory.timeline.rejection_reason(candidate.save.step, candidate.save.incarnation)


def _rejection(candidate: SaveParts | PersistentStep, reason: str) -> Rejection:
    if isinstance(candidate, PersistentStep):
        return Rejection(candidate.step, PERSISTENT, clip(reason))
    return Rejection(candidate.save.step, LOCAL, clip(reason), candidate.save.incarnation)


def _decide_persistent(
    candidate: PersistentStep, inventory: Inventory, request: _Request
) -> RestorePlan | _Blocked | str:
    """Return the plan for a persistent step; the processes that read it compare its leaves."""
    if candidate.problem:
        return candidate.problem
    digest = f"{PERSISTENT_HOLDER}/{candidate.step}"
    if Quarantined(PERSISTENT_HOLDER, digest) in inventory.quarantined:
        return "could not be read"
    wanted = request.needs_host_state and candidate.has_host_state
    if wanted and _count_differs(candidate.process_count, request):
        return _Blocked(_count_mismatch(candidate.step, candidate.process_count, request))
    return RestorePlan(
        tier=PERSISTENT,
        step=candidate.step,
        save=None,
        processes={process: ProcessPlan() for process in sorted(request.targets)},
        host_state_count=candidate.process_count if wanted else None,
    )


def _decide_local(
    part: SaveParts, usable: UsableInventory, inventory: Inventory, request: _Request
) -> RestorePlan | _Blocked | str:
    """Return the plan for this save, the reason why planning ends at it, or its missing parts."""
    if _is_replaced(part, inventory):
        return "plain Orbax wrote it, and storage now has another step of this number"
    states: HostStates | str | None = None
    if request.needs_host_state:
        states = choose_host_states(part, len(request.targets))
    matching, foreign = _by_leaves(part, inventory, request.leaves)
    tensors = SaveTensors(matching, part.manifests, part.damaged)
    assigned = assign(tensors, request.targets, usable.own) if matching else ["no manifest"]
    mismatches = _mismatches(foreign, part, request) if isinstance(assigned, list) else ()
    lacks: list[str] = []
    if isinstance(assigned, list) and not mismatches:
        lacks.append(_lost_tensors(part, usable, assigned, has_manifest=bool(matching)))
    if isinstance(states, str):
        lacks.append(states)
    if lacks or isinstance(states, str):
        return "; ".join([*lacks, *_faults(part)])
    if isinstance(assigned, list):
        kind = "state_mismatch"
        return _Blocked(NoPlan(kind, step=part.save.step, mismatches=mismatches))
    if states is not None and not states.all_empty and _count_differs(states.count, request):
        return _Blocked(_count_mismatch(part.save.step, states.count, request))
    return _plan(part, usable, assigned, states, request)


def _is_replaced(part: SaveParts, inventory: Inventory) -> bool:
    """Return whether it is a copy of a plain Orbax step that storage no longer has."""
    return is_plain(part.save.incarnation) and any(
        item.step == part.save.step and item.incarnation != part.save.incarnation
        for item in inventory.persistent
    )


def _by_leaves(
    part: SaveParts, inventory: Inventory, expected: Mapping[str, LeafSpec]
) -> tuple[dict[str, Contents], dict[str, Contents]]:
    """Return the manifests that describe the expected leaves, and those that describe others."""
    in_order = tuple(expected[path] for path in sorted(expected))
    matching: dict[str, Contents] = {}
    foreign: dict[str, Contents] = {}
    compared: dict[int, bool] = {}  # nearly all share one object
    for digest in sorted(part.manifests):
        contents = inventory.manifests[digest]
        same = compared.get(id(contents.leaves))
        if same is None:
            same = contents.leaves == in_order or not compare_leaves(expected, contents.leaves)
            compared[id(contents.leaves)] = same
        (matching if same else foreign)[digest] = contents
    return matching, foreign


def _mismatches(
    foreign: Mapping[str, Contents], part: SaveParts, request: _Request
) -> tuple[str, ...]:
    """Return the differences of a complete save of other leaves; empty when it is not complete.

    Targets are boxes of the expected leaves, so a save of other leaves is complete when its shards
    cover each of its own leaves.
    """
    by_leaves: dict[tuple[LeafSpec, ...], list[str]] = {}
    for digest, contents in foreign.items():
        by_leaves.setdefault(contents.leaves, []).append(digest)
    for leaves, digests in sorted(by_leaves.items(), key=lambda item: item[1]):
        tensors = SaveTensors({d: foreign[d] for d in digests}, part.manifests, part.damaged)
        held: dict[str, list[Box]] = {}
        for digest in digests:
            for shard in tensors.ids(digest):
                if tensors.copies(shard):
                    held.setdefault(shard.leaf, []).append(shard.box)
        if all(
            covers(whole(leaf.global_shape), sorted(held.get(leaf.path, ()))) for leaf in leaves
        ):
            return compare_leaves(request.leaves, leaves)
    return ()


def _lost_tensors(
    part: SaveParts, usable: UsableInventory, lines: list[str], *, has_manifest: bool
) -> str:
    if has_manifest:
        return f"held nowhere: {few(lines)}"
    knew = usable.known_complete.get(part.save)
    once = f", though {few(knew, 2)} once knew it to be complete" if knew else ""
    return f"no usable manifest is left{once}"


def _faults(part: SaveParts) -> list[str]:
    return [few(sorted(part.faults))] if part.faults else []


def _count_differs(saved_count: int, request: _Request) -> bool:
    return saved_count != len(request.targets) and not request.host_state_remap


def _count_mismatch(step: int, saved_count: int, request: _Request) -> NoPlan:
    return NoPlan(
        "host_state_count",
        step=step,
        missing=(
            f"step {step} has host states of {saved_count} processes, not of"
            f" {len(request.targets)}, and no remap was given",
        ),
        saved_count=saved_count,
        process_count=len(request.targets),
    )


def _plan(
    part: SaveParts,
    usable: UsableInventory,
    assigned: Mapping[int, TensorPart],
    states: HostStates | None,
    request: _Request,
) -> RestorePlan | str:
    remap = states is not None and states.count != len(request.targets)
    strangers = [] if states is None or remap else sorted(set(request.targets) - set(states.copies))
    if strangers and states is not None and not states.all_empty:
        return f"no host state belongs to process {few(strangers)}"
    hand_out = HostStateAssignment(usable, states, remap=remap)
    processes: dict[int, ProcessPlan] = {}
    for process, tensors in assigned.items():
        host_states = hand_out.of(process)
        named = _named(tensors, host_states)
        own = usable.own.get(process)
        processes[process] = ProcessPlan(
            local=tensors.local,
            fetch=tensors.fetch,
            host_states=host_states,
            addresses={name: usable.holders[name].address for name in named if name != own},
        )
    return RestorePlan(
        tier=LOCAL,
        step=part.save.step,
        save=part.save,
        processes=processes,
        host_state_count=None if states is None else states.count,
        notes=() if states is None else states.notes,
    )


def _named(tensors: TensorPart, host_states: Iterable[HostStateFetch]) -> list[str]:
    """Return every holder that one process's part names, each once."""
    alternates = (read.alternates for read in tensors.local)
    sources = (group.sources for group in tensors.fetch)
    return sorted(set[str]().union(*alternates, *sources, *(s.sources for s in host_states)))


def _nothing_left(
    usable: UsableInventory,
    inventory: Inventory,
    request: _Request,
    requested_step: int | None,
    rejected: list[Rejection],
) -> NoPlan:
    missing = tuple(_rejection_line(item) for item in rejected[:MAX_REJECTIONS])
    kind = "unrecoverable"
    if requested_step is not None:
        kind = "step_not_found"
        missing = missing or (f"step {requested_step} is in no tier",)
    elif not (inventory.persistent or usable.known_complete or _was_complete(inventory, request)):
        kind, missing = "nothing", ()
    return NoPlan(
        kind,
        step=requested_step,
        rejected=tuple(rejected[:MAX_REJECTIONS]),
        missing=missing,
        notes=tuple(clip(note) for note in usable.notes),
    )


def _rejection_line(item: Rejection) -> str:
    life = f" of incarnation {item.incarnation}" if item.incarnation else ""
    return f"step {item.step}{life}, {item.tier} tier: {item.reason}"


def _was_complete(inventory: Inventory, request: _Request) -> bool:
    """Return whether a step would be complete if no copy had failed; this is then no fresh
    start.
    """
    if not inventory.quarantined:
        return False
    before = msgspec.structs.replace(inventory, quarantined=frozenset())
    usable = filter_inventory(before)
    return any(
        not isinstance(_decide_local(part, usable, before, request), str) for part in usable.saves
    )
