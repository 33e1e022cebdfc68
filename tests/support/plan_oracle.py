"""A slow second opinion on restore plans: it counts single elements and looks at every holder.

It shares no code with the planner. ``verdict`` says what must come out, ``check_plan`` that a plan
may be executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product

from process_parts import Part, parts_of

from emergency_ckpt.core.restore.inventory import (
    HeldHostState,
    HolderInventory,
    Inventory,
    Quarantined,
)
from emergency_ckpt.core.restore.plan_types import RestorePlan, TargetSet
from emergency_ckpt.types import Box, LeafSpec, SaveId

Element = tuple[str, tuple[int, ...]]


def elements(leaf: str, box: Box) -> set[Element]:
    return {(leaf, at) for at in product(*(range(start, stop) for start, stop in box))}


class Oracle:
    def __init__(
        self,
        inventory: Inventory,
        targets: Mapping[int, TargetSet],
        leaves: Mapping[str, LeafSpec],
        *,
        remap: bool,
        needs_host_state: bool,
    ) -> None:
        self.inventory, self.targets, self.leaves = inventory, targets, leaves
        self.remap, self.needs_host_state = remap, needs_host_state
        reported = {
            (h.holder, h.process_index, h.address, h.known_complete, frozenset(h.tensors),
             frozenset(h.host_states)): h
            for h in inventory.holders
        }  # fmt: skip
        names = Counter(h.holder for h in reported.values())
        self.first_named = {}
        for holder in reported.values():
            self.first_named.setdefault(holder.holder, holder)
        indices = Counter(h.process_index for h in self.first_named.values())
        self.holders: dict[str, HolderInventory] = {
            h.holder: h
            for h in self.first_named.values()
            if names[h.holder] == 1 and (h.process_index is None or indices[h.process_index] == 1)
        }

    def quarantined(self, holder: str, digest: str, shard: int | None = None) -> bool:
        out = self.inventory.quarantined
        return Quarantined(holder, digest, None) in out or Quarantined(holder, digest, shard) in out

    def has_shard(self, holder: str, save: SaveId, digest: str, shard: int) -> bool:
        known = self.holders.get(holder)
        contents = self.inventory.manifests.get(digest)
        return (
            known is not None
            and contents is not None
            and contents.save == save
            and any(t.save == save and t.digest == digest for t in known.tensors)
            and not self.quarantined(holder, digest, shard)
        )

    def has_host_state(self, holder: str, save: SaveId, owner: int, digest: str) -> bool:
        known = self.holders.get(holder)
        return known is not None and any(
            (s.save, s.owner, s.digest) == (save, owner, digest)
            and not self.quarantined(holder, s.digest)
            for s in known.host_states
        )

    def manifests(self, save: SaveId) -> list[str]:
        """Digests that somebody published for this save, and that can be read."""
        return sorted(
            {
                t.digest
                for h in self.holders.values()
                for t in h.tensors
                if t.save == save
                and t.digest in self.inventory.manifests
                and self.inventory.manifests[t.digest].save == save
                and not self.quarantined(h.holder, t.digest)
            }
        )

    def held(self, save: SaveId, digests: Iterable[str]) -> set[Element]:
        out: set[Element] = set()
        for digest in digests:
            contents = self.inventory.manifests[digest]
            for index, entry in enumerate(contents.shards):
                if 0 <= entry.leaf < len(contents.leaves) and any(
                    self.has_shard(name, save, digest, index) for name in self.holders
                ):
                    out |= elements(contents.leaves[entry.leaf].path, entry.box)
        return out

    def matches(self, leaves: tuple[LeafSpec, ...]) -> bool:
        return set(leaves) == set(self.leaves.values())

    def tensors(self, save: SaveId) -> str:
        """``whole``, ``foreign`` (whole, but of other leaves) or ``lost``."""
        digests = self.manifests(save)
        by_leaves: dict[tuple[LeafSpec, ...], list[str]] = {}
        for digest in digests:
            leaves = self.inventory.manifests[digest].leaves
            by_leaves.setdefault(leaves, []).append(digest)
        matching = [d for leaves, ds in by_leaves.items() if self.matches(leaves) for d in ds]
        wanted = {
            e for target in self.targets.values() for s in target for e in elements(s.leaf, s.box)
        }
        if matching and wanted <= self.held(save, matching):
            return "whole"
        for leaves, group in by_leaves.items():
            if not self.matches(leaves):
                full = set()
                for leaf in leaves:
                    full |= elements(leaf.path, tuple((0, n) for n in leaf.global_shape))
                if full <= self.held(save, group):
                    return "foreign"
        return "lost"

    def intact_host_states(self, save: SaveId) -> list[HeldHostState]:
        return [
            s
            for h in self.holders.values()
            for s in h.host_states
            if s.save == save
            and not self.quarantined(h.holder, s.digest)
            # Of nobody in a job of so many: no such document is ever read.
            and 0 <= s.owner < s.count
        ]

    def host_states(self, save: SaveId) -> str:
        """``whole``, ``other count`` or ``lost``."""
        count_now = len(self.targets)
        if not self.needs_host_state:
            return "whole"
        states = self.intact_host_states(save)
        counts = sorted(
            n
            for n in {s.count for s in states}
            if n > 0 and {s.owner for s in states if s.count == n} >= set(range(n))
        )
        if count_now in counts:
            return "whole"
        if not counts:
            return "lost"
        if self.remap or all(s.empty for s in states if s.count == counts[-1]):
            return "whole"
        return "other count"

    def local(self, save: SaveId) -> str:
        tensors, states = self.tensors(save), self.host_states(save)
        if "lost" in (tensors, states):
            return "no"
        if tensors == "foreign":
            return "state_mismatch"
        return "host_state_count" if states == "other count" else "restore"

    def persistent(self, step: int, count: int, has_host_state: bool) -> str:
        if Quarantined("persistent", f"persistent/{step}") in self.inventory.quarantined:
            return "no"
        wanted = self.needs_host_state and has_host_state
        if wanted and count != len(self.targets) and not self.remap:
            return "host_state_count"
        return "restore"

    def verdict(self, requested_step: int | None) -> tuple[str, int | None, SaveId | None]:
        """(what must come out, the step, the save) of the newest candidate that ends the search."""
        saves = {t.save for h in self.holders.values() for t in h.tensors}
        saves |= {s.save for h in self.holders.values() for s in h.host_states}
        candidates: list[tuple[tuple[int, int, str, str], SaveId | None, str]] = []
        for save in saves:
            rank = (save.step, 1, save.incarnation, save.run_id)
            candidates.append((rank, save, self.local(save)))
        for item in self.inventory.persistent:
            outcome = self.persistent(item.step, item.process_count, item.has_host_state)
            candidates.append(((item.step, 0, "", ""), None, outcome))
        for (step, *_), save, outcome in sorted(candidates, key=lambda c: c[0], reverse=True):
            if outcome != "no" and requested_step in (None, step):
                return outcome, step, save
        return "none", None, None

    def check_plan(self, plan: RestorePlan) -> None:
        """Every source has what is asked of it, and all targets are whole."""
        assert set(plan.copies) == set(self.targets)
        if plan.save is None:
            return
        own = {h.process_index: h.holder for h in self.holders.values()}
        for process, part in parts_of(plan, self.inventory, self.targets).items():
            self.check_process(plan.save, process, part, own.get(process))
            self.check_host_states(plan, process, part)
            named = {n for r in part.local for n in r.alternates}
            named |= {n for g in part.fetch for n in g.sources}
            named |= {n for s in part.host_states for n in s.sources}
            named.discard(own.get(process, ""))
            share, common = plan.share_of([process]), plan.common()
            addresses = (share.with_common(common) if common else share).addresses
            assert addresses == {n: self.holders[n].address for n in addresses}
            assert named <= addresses.keys()

    def check_process(self, save: SaveId, process: int, part: Part, own: str | None) -> None:
        given: set[Element] = set()
        uses: list[tuple[str, tuple[int, ...], tuple[str, ...]]] = []
        for read in part.local:
            assert own is not None
            assert own not in read.alternates
            uses.append((read.digest, read.shards, (own, *read.alternates)))
        for group in part.fetch:
            assert group.sources
            assert own not in group.sources
            assert len(set(group.sources)) == len(group.sources)
            uses.append((group.digest, group.shards, group.sources))
        boxes: set[tuple[str, Box]] = set()
        for digest, shards, sources in uses:
            contents = self.inventory.manifests[digest]
            assert self.matches(contents.leaves)
            for index in shards:
                for source in sources:
                    assert self.has_shard(source, save, digest, index)
                entry = contents.shards[index]
                leaf = contents.leaves[entry.leaf].path
                boxes.add((leaf, entry.box))
                given |= elements(leaf, entry.box)
        for target in self.targets[process]:
            wanted = elements(target.leaf, target.box)
            assert wanted <= given
            exact = own is not None and any(
                contents.save == save
                and self.matches(contents.leaves)
                and (contents.leaves[e.leaf].path, e.box) == (target.leaf, target.box)
                and self.has_shard(own, save, digest, index)
                for digest, contents in self.inventory.manifests.items()
                for index, e in enumerate(contents.shards)
                if 0 <= e.leaf < len(contents.leaves)
            )
            if exact and wanted:  # a shard without elements has no bytes to use
                assert (target.leaf, target.box) in boxes, "an own copy is not used"

    def check_host_states(self, plan: RestorePlan, process: int, part: Part) -> None:
        assert plan.save is not None
        for state in part.host_states:
            assert state.sources
            for source in state.sources:
                assert self.has_host_state(source, plan.save, state.owner, state.digest)
        owners = [state.owner for state in part.host_states]
        count, count_now = plan.host_state_count, len(self.targets)
        assert count is None or self.needs_host_state
        if count is not None and count != count_now:
            assert owners == list(range(count))
            return
        states = self.intact_host_states(plan.save)
        held = {s.owner for s in states if s.count == count_now}
        if held >= set(range(count_now)):
            assert owners == [process]
        else:
            assert count is None
            assert owners == []
            assert not self.needs_host_state or any(s.empty for s in states)
