"""Choice of the step to restore, and the copies of every part of it. Pure.

The newest complete step of both tiers wins; of two complete saves of one step, the one of the
later incarnation; a save in both tiers is taken from the local one. Parts of different saves are
never combined. Rolled-back saves (``core.timeline``) come last, or are excluded. Each newer save
that is passed over is reported with what it lacked.

1. ``filter_inventory`` groups the reported inventories by save, and drops what is unusable.
2. ``plan_restore`` goes through the saves, newest first, down to the first that is complete: in
   tensors by the sets of shards that the holders report, else by the manifests (``copies``), and in
   host states by ``choose_host_states``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from emergency_ckpt.core.boxes import covers, whole
from emergency_ckpt.core.restore.copies import Needs, SaveTensors, locate, spread
from emergency_ckpt.core.restore.divergence import left_out
from emergency_ckpt.core.restore.inventory import (
    HeldHostState,
    HolderInventory,
    Inventory,
    PersistentStep,
    persistent_unreadable,
    persistent_unusable,
)
from emergency_ckpt.core.restore.leaves import compare_leaves
from emergency_ckpt.core.restore.plan_types import (
    MAX_REJECTIONS,
    Bundle,
    Copies,
    HostStateFetch,
    ManifestHolders,
    NoPlan,
    OwnManifest,
    Rejection,
    RestorePlan,
    TargetSet,
    clip,
)
from emergency_ckpt.core.timeline import is_plain
from emergency_ckpt.core.wording import few
from emergency_ckpt.types import LOCAL, PERSISTENT, Box, Contents, LeafSpec, SaveId

MAX_HOST_STATE_SOURCES = 4


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
    """Choose the step to restore, and find the copies of every shard and host state.

    The choice is deterministic, and independent of the order of the inventory's parts. The function
    never raises for values of the right types.

    Three faults end the planning instead of leading to an older step, which would silently discard
    training: leaves that differ from the expected ones, and host states of another number of
    processes without a remap, both of which most likely hold for every older step too; and a step
    of another program, which the step log does not name.

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
    planner = _Planner(inventory, targets, leaves, host_state_remap, needs_host_state)
    rejected: list[Rejection] = []
    candidates = list(planner.newest_first(requested_step))
    if takes_rolled_back:
        candidates.sort(key=lambda candidate: bool(planner.rejection_reason(candidate)))
    for candidate in candidates:
        rejection_reason = planner.rejection_reason(candidate)
        if rejection_reason and not takes_rolled_back:
            rejection = _rejection(candidate, rejection_reason)
            rejected.append(msgspec.structs.replace(rejection, is_left=True))
            continue
        if isinstance(candidate, PersistentStep):
            verdict = planner.decide_persistent(candidate)
        else:
            verdict = planner.decide_local(candidate)
        if isinstance(verdict, str):
            rejected.append(
                msgspec.structs.replace(
                    _rejection(candidate, verdict), is_unreadable=planner.is_unreadable(candidate)
                )
            )
            continue
        return msgspec.structs.replace(verdict, rejected=tuple(rejected[:MAX_REJECTIONS]))
    return planner.nothing_left(requested_step, rejected)


class _Planner:
    """The candidates of one inventory, and a verdict on each. For the arguments: ``plan_restore``.

    A verdict is the plan; NoPlan for a step at which planning ends; text: what a step lacks.
    """

    def __init__(
        self,
        inventory: Inventory,
        targets: Mapping[int, TargetSet],
        leaves: Mapping[str, LeafSpec],
        host_state_remap: bool,
        needs_host_state: bool,
    ) -> None:
        self._inventory = inventory
        self._usable = filter_inventory(inventory)
        self._targets = targets
        self._processes = range(len(targets))
        self._leaves = leaves
        self._host_state_remap = host_state_remap
        self._needs_host_state = needs_host_state

    def newest_first(self, requested_step: int | None) -> Iterator[SaveParts | PersistentStep]:
        """Yield the candidates in order of preference."""
        persistent = {item.step: item for item in sorted(self._inventory.persistent)}
        local: dict[int, list[SaveParts]] = {}
        for part in self._usable.saves:
            local.setdefault(part.save.step, []).append(part)
        for step in sorted(local.keys() | persistent.keys(), reverse=True):
            if requested_step is not None and step != requested_step:
                continue
            stored = persistent.get(step)
            for part in local.get(step, ()):  # the latest incarnation first
                if stored is not None and not stored.is_foreign and _is_later(stored, part):
                    yield stored
                    stored = None
                yield part
            if stored is not None:
                yield stored

    def rejection_reason(self, candidate: SaveParts | PersistentStep) -> str:
        """Return why the timeline excludes the candidate; empty when it does not."""
        timeline = self._inventory.timeline
        if timeline is None:
            return ""
        if isinstance(candidate, PersistentStep):
            if not candidate.is_seen:
                return ""  # an inspection will tell
            return timeline.rejection_reason(candidate.step, candidate.incarnation)
        return timeline.rejection_reason(candidate.save.step, candidate.save.incarnation)

    def is_unreadable(self, candidate: SaveParts | PersistentStep) -> bool:
        """Return whether the files of a stored step could not be read."""
        is_stored = isinstance(candidate, PersistentStep)
        return is_stored and persistent_unreadable(candidate.step) in self._inventory.quarantined

    def decide_persistent(self, candidate: PersistentStep) -> RestorePlan | NoPlan | str:
        """Return the verdict on a stored step; the processes that read it compare its leaves."""
        if candidate.is_foreign:
            return NoPlan("foreign", step=candidate.step, missing=(candidate.problem,))
        if candidate.problem:
            return candidate.problem
        if persistent_unusable(candidate.step) in self._inventory.quarantined:
            return "could not be read"
        host_state_count: int | None = None
        if self._needs_host_state and candidate.has_host_state:
            host_state_count = candidate.process_count
            mismatch = self._count_mismatch(candidate.step, host_state_count)
            if mismatch is not None:
                return mismatch
        copies = {process: Copies() for process in self._processes}
        return RestorePlan(candidate.step, None, copies, host_state_count=host_state_count)

    def decide_local(self, part: SaveParts) -> RestorePlan | NoPlan | str:
        """Return the verdict on a save in RAM."""
        step = part.save.step
        if is_plain(part.save.incarnation) and any(
            item.step == step and item.incarnation != part.save.incarnation
            for item in self._inventory.persistent
        ):
            return "plain Orbax wrote it, and storage now has another step of this number"
        states = choose_host_states(part, len(self._processes))
        matching: dict[str, Contents] = {}
        foreign: dict[str, Contents] = {}
        others: dict[str, frozenset[int]] = {}
        copies: dict[int, Copies] | list[str] | None = self._whole_copies(part)
        if copies is None:
            matching, foreign = _by_leaves(part, self._inventory, self._leaves)
            others = left_out(part.save, matching, part.manifests, part.damaged)
            tensors = SaveTensors(matching, part.manifests, _without(part, others))
            copies = ["no manifest"]
            if matching:
                copies = locate(tensors, self._targets, self._usable.own)
        mismatches = self._mismatches(foreign, part) if isinstance(copies, list) else ()
        lacks: list[str] = []
        if isinstance(copies, list) and not mismatches:
            if matching:
                lacks.append(f"held nowhere: {few(copies)}")
            else:
                knew = self._usable.known_complete.get(part.save)
                once = f", though {few(knew, 2)} once knew it to be complete" if knew else ""
                lacks.append(f"no usable manifest is left{once}")
            if others:
                lacks.append("copies differ, and those that are taken are damaged")
        if self._needs_host_state and isinstance(states, str):
            lacks.append(states)
        if lacks:
            return "; ".join([*lacks, *([few(sorted(part.faults))] if part.faults else [])])
        if isinstance(copies, list):
            return NoPlan("state_mismatch", step=step, mismatches=mismatches)
        plan = RestorePlan(
            step,
            part.save,
            copies,
            addresses={name: holder.address for name, holder in self._usable.holders.items()},
        )
        if isinstance(states, str):
            return plan
        return self._with_host_states(plan, states)

    def _whole_copies(self, part: SaveParts) -> dict[int, Copies] | None:
        """Return the copies where each process needs just the shards of one manifest; else None.

        The reported sets of shards suffice, so no manifest is read. All manifests of the save must
        be such ones: else some process may have a part that only its manifest tells of.
        """
        needs = self._inventory.needs
        needed = dict.fromkeys(needs.get(process, ()) for process in self._processes)
        # Nobody's report shows that a save of other leaves suits a process that needs no shard.
        if () in needed or part.must_be_read or part.layouts.keys() != needed.keys():
            return None
        whole: dict[tuple[str, ...], Needs] = {}
        at_hand: dict[str, list[OwnManifest]] = {}
        for names in needed:
            sources = [ManifestHolders(d, tuple(h)) for d, h in sorted(part.layouts[names].items())]
            whole[names] = Needs((Bundle(None, (), tuple(sources)),))
            for source in sources:
                for holder in source.holders:
                    at_hand.setdefault(holder, []).append(OwnManifest(source.digest, ()))

        def own(process: int) -> tuple[OwnManifest, ...]:
            manifests = at_hand.get(self._usable.own.get(process, ""), ())
            return tuple(sorted(manifests, key=lambda manifest: manifest.digest))

        return spread(whole, {process: needs[process] for process in self._processes}, own)

    def _mismatches(self, foreign: Mapping[str, Contents], part: SaveParts) -> tuple[str, ...]:
        """Return the differences of a complete save of other leaves; empty when it is not complete.

        Targets are boxes of the expected leaves, so a save of other leaves is complete when its
        shards cover each of its own leaves.
        """
        by_leaves: dict[tuple[LeafSpec, ...], list[str]] = {}
        for digest, contents in foreign.items():
            by_leaves.setdefault(contents.leaves, []).append(digest)
        for leaves, digests in sorted(by_leaves.items(), key=lambda item: item[1]):
            tensors = SaveTensors({d: foreign[d] for d in digests}, part.manifests, part.damaged)
            boxes_of: dict[str, list[Box]] = {}
            for digest in digests:
                for shard in tensors.ids(digest):
                    if tensors.copies(shard):
                        boxes_of.setdefault(shard.leaf, []).append(shard.box)
            if all(
                covers(whole(leaf.global_shape), sorted(boxes_of.get(leaf.path, ())))
                for leaf in leaves
            ):
                return compare_leaves(self._leaves, leaves)
        return ()

    def _count_mismatch(self, step: int, saved_count: int) -> NoPlan | None:
        """Return why ``saved_count`` host states do not fit the job; None when they do."""
        count = len(self._processes)
        if saved_count == count or self._host_state_remap:
            return None
        missing = (
            f"step {step} has host states of {saved_count} processes, not of {count}, and no remap"
            " was given"
        )
        return NoPlan(
            "host_state_count",
            step=step,
            missing=(missing,),
            saved_count=saved_count,
            process_count=count,
        )

    def _with_host_states(self, plan: RestorePlan, states: HostStates) -> RestorePlan | NoPlan:
        """Return the plan with the host states that each process applies or keeps.

        A process that has lost its own one keeps it again, also where none is applied: else the
        next loss would take the last copy.
        """
        is_applied = self._needs_host_state and not states.all_empty
        if is_applied:
            plan = msgspec.structs.replace(plan, host_state_count=states.count)
        if states.count != len(self._processes):
            if not is_applied:
                return plan
            if mismatch := self._count_mismatch(plan.step, states.count):
                return mismatch
            every_owner = tuple(
                HostStateFetch(owner, digest, holders[:MAX_HOST_STATE_SOURCES])
                for owner, (digest, holders) in states.copies.items()
            )
            return msgspec.structs.replace(plan, every_host_state=every_owner)
        handed: dict[int, Copies] = {}
        for process, of_process in plan.copies.items():
            me = self._usable.own.get(process, "")
            host_states = (_own_host_state(process, states, me),)
            handed[process] = msgspec.structs.replace(of_process, host_states=host_states)
        return msgspec.structs.replace(plan, copies=handed)

    def nothing_left(self, requested_step: int | None, rejected: list[Rejection]) -> NoPlan:
        """Return the end of a planning that has passed over every candidate."""
        missing: list[str] = []
        for item in rejected[:MAX_REJECTIONS]:
            which = f" of incarnation {item.incarnation}" if item.incarnation else ""
            missing.append(f"step {item.step}{which}, {item.tier} tier: {item.reason}")
        kind = "unrecoverable"
        if requested_step is not None:
            kind = "step_not_found"
            missing = missing or [f"step {requested_step} is in no tier"]
        elif not (
            self._inventory.persistent or self._usable.known_complete or self._was_complete()
        ):
            kind, missing = "nothing", []
        return NoPlan(
            kind,
            step=requested_step,
            rejected=tuple(rejected[:MAX_REJECTIONS]),
            missing=tuple(missing),
            notes=(clip(self._usable.note),) if self._usable.note else (),
        )

    def _was_complete(self) -> bool:
        """Return whether a step would be complete if no copy had failed: no fresh start."""
        if not self._inventory.quarantined:
            return False
        before = _Planner(
            msgspec.structs.replace(self._inventory, quarantined=frozenset()),
            self._targets,
            self._leaves,
            self._host_state_remap,
            self._needs_host_state,
        )
        return any(not isinstance(before.decide_local(part), str) for part in before._usable.saves)


def _is_later(stored: PersistentStep, part: SaveParts) -> bool:
    """Return whether the stored step was saved after ``part``, which has the same number.

    The tensors of ``part`` itself, whose host states are gone in storage, are not.
    """
    saved = part.save.incarnation
    return stored.incarnation > saved and stored.tensors_of != saved


def _rejection(candidate: SaveParts | PersistentStep, reason: str) -> Rejection:
    if isinstance(candidate, PersistentStep):
        return Rejection(candidate.step, PERSISTENT, clip(reason))
    return Rejection(candidate.save.step, LOCAL, clip(reason), candidate.save.incarnation)


def _without(
    part: SaveParts, others: Mapping[str, frozenset[int]]
) -> dict[str, dict[str, frozenset[int]]]:
    """Return the shards that must not be used at each holder: damaged, or of ``others``."""
    unusable = dict(part.damaged)
    for digest, shards in others.items():
        damaged = part.damaged.get(digest, {})
        unusable[digest] = {
            holder: damaged.get(holder, frozenset()) | shards for holder in part.manifests[digest]
        }
    return unusable


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


def _own_host_state(process: int, states: HostStates, me: str) -> HostStateFetch:
    """Return the host state of ``process``, which has the name ``me`` as a holder."""
    digest, holders = states.copies[process]
    start = process % len(holders)  # spreads a lost slice's fetches over the buddies' slices
    order = [name for name in holders[start:] + holders[:start] if name != me]
    if me in holders:
        order.insert(0, me)
    return HostStateFetch(process, digest, tuple(order[:MAX_HOST_STATE_SOURCES]))


@dataclass
class SaveParts:
    """The held parts of one save. Holders' names are in the order of ``UsableInventory.holders``.

    Attributes:
      manifests: digest -> holders that published it and have it intact or in part.
      damaged: digest -> holder -> shard indices that are quarantined there.
      layouts: names of the sets of shards -> digest -> holders, by the holders' reports.
      must_be_read: the reports of the sets do not suffice. A manifest has no report, a shard is
        quarantined, or a set has other bytes in one manifest than in another.
      host_states: (holder, what it holds) of each intact host state.
      faults: reported parts of this save that cannot be used, in words.
    """

    save: SaveId
    manifests: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    damaged: dict[str, dict[str, frozenset[int]]] = field(
        default_factory=dict[str, dict[str, frozenset[int]]]
    )
    layouts: dict[tuple[str, ...], dict[str, list[str]]] = field(
        default_factory=dict[tuple[str, ...], dict[str, list[str]]]
    )
    must_be_read: bool = False
    host_states: list[tuple[str, HeldHostState]] = field(
        default_factory=list[tuple[str, HeldHostState]]
    )
    faults: list[str] = field(default_factory=list[str])
    _sets: dict[str, str] = field(default_factory=dict[str, str])

    def add(
        self,
        holder: str,
        digest: str,
        sets: Mapping[str, str] | None,
        fault: str,
        bad: set[int] | None,
    ) -> None:
        """Add a manifest of a holder.

        Args:
          sets: of its shards; None where they are not known.
          fault: why the manifest itself cannot be used; empty when it can.
          bad: the shards that are quarantined there.
        """
        label = f"manifest {digest[:12]} at {holder}"
        if sets is None or bad:
            self.must_be_read = True
        elif sets:  # no process needs a manifest without shards
            at = self.layouts.setdefault(tuple(sorted(sets)), {}).setdefault(digest, [])
            at.append(holder)
            for name, crcs in sets.items():
                self.must_be_read |= self._sets.setdefault(name, crcs) != crcs
        if bad:
            self.damaged.setdefault(digest, {})[holder] = frozenset(bad)
        if fault:
            self.faults.append(f"{label} {fault}")
            return
        self.manifests.setdefault(digest, []).append(holder)
        if bad:
            count = f"{len(bad)} shard{'s' if len(bad) > 1 else ''}"
            self.faults.append(f"{count} of {label} quarantined")


@dataclass
class UsableInventory:
    """The usable part of an inventory.

    Attributes:
      holders: by name; processes by index, then servers by name.
      own: process index -> name of the holder that is that process.
      saves: newest first (step, then incarnation).
      known_complete: saves once known to be complete -> the holders that knew.
      note: which holders contradict each other, and are dropped; empty without any.
    """

    holders: dict[str, HolderInventory]
    own: dict[int, str]
    saves: list[SaveParts]
    known_complete: dict[SaveId, list[str]]
    note: str


def filter_inventory(inventory: Inventory) -> UsableInventory:
    """Drop holders with contradictory names and unusable manifests; group the rest by save."""
    holders, note = _distinct_holders(inventory.holders)
    entire: set[tuple[str, str]] = set()  # holder and digest
    partial: dict[tuple[str, str], set[int]] = {}
    for item in inventory.quarantined:
        if item.shard is None:
            entire.add((item.holder, item.digest))
        else:
            partial.setdefault((item.holder, item.digest), set()).add(item.shard)
    parts: dict[SaveId, SaveParts] = {}
    complete: dict[SaveId, list[str]] = {}

    def part_of(save: SaveId) -> SaveParts:
        if save not in parts:
            parts[save] = SaveParts(save)
        return parts[save]

    for name, holder in holders.items():
        if holder.known_complete is not None:
            complete.setdefault(holder.known_complete, []).append(name)
            part_of(holder.known_complete)  # listed, even if no holder has a part
        for manifest in sorted(set(holder.tensors)):
            where = (name, manifest.digest)
            contents = inventory.manifests.get(manifest.digest)
            fault = _fault_of(manifest.save, contents, is_quarantined=where in entire)
            sets = holder.sets.get(manifest.digest)
            if fault and (contents is not None or where in entire):
                sets = {}  # none of its shards is used
            part_of(manifest.save).add(name, manifest.digest, sets, fault, partial.get(where))
        for host_state in holder.host_states:
            part = part_of(host_state.save)
            if (name, host_state.digest) in entire:
                part.faults.append(f"host state {host_state.owner} at {name} is quarantined")
            else:
                part.host_states.append((name, host_state))
    newest_first = sorted(parts.values(), key=lambda part: part.save, reverse=True)
    own = {h.process_index: h.holder for h in holders.values() if h.process_index is not None}
    return UsableInventory(holders, own, newest_first, complete, note)


def _fault_of(save: SaveId, contents: Contents | None, *, is_quarantined: bool) -> str:
    """Return why a manifest of ``save`` cannot be used; empty when it can."""
    if contents is None:
        return "could not be read"
    if contents.save != save:
        return f"is of another save (step {contents.save.step})"
    return "is quarantined" if is_quarantined else ""


def _distinct_holders(
    reported: Iterable[HolderInventory],
) -> tuple[dict[str, HolderInventory], str]:
    """Return holders by name, and which were dropped: two share a name or a process index."""
    by_name: dict[str, HolderInventory] = {}
    contradictory: set[str] = set()
    for holder in reported:
        first = by_name.setdefault(holder.holder, holder)
        if first is not holder and not _same(first, holder):
            contradictory.add(holder.holder)
    indices = Counter(h.process_index for h in by_name.values() if h.process_index is not None)
    for holder in by_name.values():
        if holder.process_index is not None and indices[holder.process_index] > 1:
            contradictory.add(holder.holder)
    note = ""
    if contradictory:
        names = few(sorted(contradictory))
        note = f"ignored {names}: more than one inventory under one name or process index"
    consistent = [h for name, h in by_name.items() if name not in contradictory]
    consistent.sort(key=lambda h: (h.process_index is None, h.process_index or 0, h.holder))
    return {h.holder: h for h in consistent}, note


def _same(a: HolderInventory, b: HolderInventory) -> bool:
    """Return whether two inventories of one name are equal, in whatever order their parts are."""
    return (
        (a.process_index, a.address, a.known_complete, a.known_stored)
        == (b.process_index, b.address, b.known_complete, b.known_stored)
        and set(a.tensors) == set(b.tensors)
        and set(a.host_states) == set(b.host_states)
    )


@dataclass(frozen=True)
class HostStates:
    """A complete set of host states of one save.

    Attributes:
      count: number of processes at the time of the save.
      copies: by owner: the digest to use and its holders.
      all_empty: every held copy says that no process had any non-tensor state.
    """

    count: int
    copies: Mapping[int, tuple[str, tuple[str, ...]]]
    all_empty: bool


_Copies = dict[str, dict[str, bool]]
"""digest -> holder -> whether it is empty"""


def choose_host_states(part: SaveParts, process_count: int) -> HostStates | str:
    """Return the host states of the save, or the missing ones in words.

    A save's host states should all name one process count. Otherwise a complete set of the current
    count is preferred, then one of the larger count; sets are never mixed.
    """
    sets: dict[int, dict[int, _Copies]] = {}
    for holder, host_state in part.host_states:
        if 0 <= host_state.owner < host_state.count:
            copies = sets.setdefault(host_state.count, {}).setdefault(host_state.owner, {})
            by_holder = copies.setdefault(host_state.digest, {})
            by_holder[holder] = by_holder.get(holder, True) and host_state.empty
    if not sets:
        return "no host state is held anywhere"
    complete = [size for size, owners in sets.items() if len(owners) == size]
    if not complete:
        size = min(sets, key=lambda size: (size - len(sets[size]), -size))
        owners = sets[size]
        lost = size - len(owners)
        first = islice((owner for owner in range(size) if owner not in owners), 4)
        names = ", ".join(map(str, first)) + (" ..." if lost > 4 else "")
        return f"{lost} of {size} host states are held nowhere: process {names}"
    size = max(complete, key=lambda size: (size == process_count, size))
    chosen: dict[int, tuple[str, tuple[str, ...]]] = {}
    all_empty = True
    for owner, by_digest in sorted(sets[size].items()):
        # Only the owner makes a host state, and copies are pushed unchanged: two digests mean that
        # the owner made the host state twice. All processes take the smaller digest. The owner's
        # own copy has no precedence, because process indices may have been permuted.
        digest = min(by_digest)
        chosen[owner] = (digest, tuple(by_digest[digest]))
        all_empty = all_empty and all(all(holders.values()) for holders in by_digest.values())
    return HostStates(size, chosen, all_empty)
