"""What every tier does: one list of cases, for RAM, storage on disk and in a bucket, and memory.

A case gets a ``Place``: somewhere a tier keeps its steps, which outlives the tier's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pytest
from memory_tier import MemoryStep, MemoryTier, boxes_of
from persistent_steps import RUN_ID, life
from state_samples import random_bits

from emergency_ckpt import _native
from emergency_ckpt.core.boxes import Box, volume, whole
from emergency_ckpt.core.timeline import Timeline, continued
from emergency_ckpt.errors import CheckpointError, CorruptData, HostStateError, StepNotFound
from emergency_ckpt.state import host_state
from emergency_ckpt.tier import Array, StepReader, Tier, read_leaf
from emergency_ckpt.types import LeafSpec, SaveId

LEAVES = (
    LeafSpec("params/w", "float32", (64, 64)),
    LeafSpec("params/b", "bfloat16", (32,)),
    LeafSpec("empty", "float32", (0, 4)),
    LeafSpec("count", "int32", ()),
    LeafSpec("mask", "bool", (4, 2)),
    LeafSpec("small", "float8_e4m3fn", (8,)),
    LeafSpec("rng", "uint32", (2,), "threefry2x32"),
)
PROCESSES = 3


class Place(Protocol):
    """Where a tier keeps its steps."""

    def tier(self) -> Tier:
        """Begin a life: a tier as a start of a job has it. The one before has ended."""
        ...

    def publish(
        self, tier: Any, step: StepReader, life: str, chain: Timeline | None = None
    ) -> None:
        """Write ``step`` and make it count, by the calls of what writes such a tier in a job.

        ``chain``: becomes the binding one.
        """
        ...

    def damage(self, step: int) -> None:
        """Flip a bit of the largest leaf of ``step``, below the tier."""
        ...


def sample(step: int, incarnation: str = life(1), seed: int | None = None) -> MemoryStep:
    """A step whose bytes are those of ``seed``, or of its number."""
    save, seed = SaveId(step, incarnation, RUN_ID), step if seed is None else seed
    arrays = {
        leaf.path: (
            leaf,
            random_bits(leaf.global_shape, leaf.dtype, seed),
            boxes_of(leaf, 2),
        )
        for leaf in LEAVES
    }
    payloads = [{"at": seed, "of": owner} for owner in range(PROCESSES - 1)] + [None]
    documents = {
        owner: host_state.encode(save, owner, PROCESSES, host_state.capture(payload))
        for owner, payload in enumerate(payloads)
    }
    return MemoryStep.of(save, arrays, documents)


def same(found: StepReader, expected: MemoryStep) -> bool:
    """Whether two steps have the same identity, leaves, bytes and host states."""
    return (
        found.save == expected.save
        and dict(found.leaves) == dict(expected.leaves)
        and found.host_states() == expected.host_states()
        and all(
            read_leaf(found, path).tobytes() == read_leaf(expected, path).tobytes()
            for path in expected.leaves
        )
    )


def absent(tier: Tier, step: int) -> bool:
    with pytest.raises(StepNotFound):
        tier.open_step(step)
    return step not in [save.step for save in tier.complete_steps()]


class Failing(MemoryStep):
    """A step of which ``params/w`` cannot be read; or its host states, where ``documents``."""

    broken = "params/w"

    def read(self, path: str, box: Box) -> Array:
        if path == self.broken:
            raise CorruptData("read", self.name, "no copy is sound")
        return super().read(path, box)

    def host_states(self) -> dict[int, bytes]:
        if self.broken == "documents":
            raise HostStateError("read", self.name, "1 of 3 host states are held nowhere")
        return super().host_states()


def step_comes_back_as_it_was_published(place: Place) -> None:
    tier, step = place.tier(), sample(4)
    place.publish(tier, step, life(1))
    assert tier.complete_steps() == [step.save]
    assert same(tier.open_step(4), step)


def boxes_make_up_each_leaf_and_crcs_are_theirs(place: Place) -> None:
    tier = place.tier()
    place.publish(tier, sample(4), life(1))
    found = tier.open_step(4)
    for path, leaf in found.leaves.items():
        boxes, crcs = found.boxes(path), found.crcs(path)
        assert sum(map(volume, boxes)) == volume(whole(leaf.global_shape))
        for box in boxes:
            data = found.read(path, box)
            assert data.dtype.name == leaf.dtype
            assert crcs[box] == _native.crc32c(data.tobytes())
        assert {each.box: each.crc32c for each in found.copies(path)} == dict(crcs)
    first, second = ((0, 20), (3, 64)), ((20, 64), (3, 64))  # across the saved boxes
    parts = [found.read("params/w", box) for box in (first, second)]
    assert np.concatenate(parts).tobytes() == read_leaf(found, "params/w")[:, 3:].tobytes()


def host_states_are_named_and_read_one_by_one(place: Place) -> None:
    tier, step = place.tier(), sample(4)
    place.publish(tier, step, life(1))
    found = tier.open_step(4)
    held = [each.held for each in found.documents()]
    assert [(each.owner, each.count) for each in held] == [(n, PROCESSES) for n in range(PROCESSES)]
    assert [each.empty for each in held] == [False] * (PROCESSES - 1) + [True]
    assert {each.owner: found.document(each) for each in held} == step.host_states()


def newest_of_several_steps_counts(place: Place) -> None:
    tier = place.tier()
    for step in (3, 5, 9):
        place.publish(tier, sample(step), life(1))
    complete = tier.complete_steps()
    assert complete == sorted(complete)
    assert complete[-1] == sample(9).save
    assert same(tier.open_step(9), sample(9))


def next_life_finds_the_step(place: Place) -> None:
    place.publish(place.tier(), sample(4), life(1))
    tier = place.tier()
    assert tier.complete_steps() == [sample(4).save]
    assert same(tier.open_step(4), sample(4))


def step_saved_again_by_a_later_life_replaces_it(place: Place) -> None:
    """That life went back to a step before it."""
    place.publish(place.tier(), sample(2), life(1))
    place.publish(place.tier(), sample(4), life(1))
    tier, again = place.tier(), sample(4, life(2), seed=40)
    place.publish(tier, again, life(2), continued(None, sample(2).save, life(2)))
    assert tier.complete_steps()[-1] == again.save
    assert same(tier.open_step(4), again)


def chain_takes_out_what_was_rolled_back(place: Place) -> None:
    place.publish(place.tier(), sample(4), life(1))
    place.publish(place.tier(), sample(8), life(1))
    tier, again = place.tier(), sample(6, life(2))
    place.publish(tier, again, life(2), continued(None, sample(4).save, life(2)))
    complete = tier.complete_steps()
    assert complete[-1] == again.save
    assert sample(8).save not in complete


def removed_step_is_gone_in_each_life(place: Place) -> None:
    tier = place.tier()
    place.publish(tier, sample(4), life(1))
    place.publish(tier, sample(5), life(1))
    tier.remove(5, life(1))
    tier.remove(5, life(1))
    tier.remove(77, life(1))
    assert absent(tier, 5)
    assert same(tier.open_step(4), sample(4))
    assert absent(place.tier(), 5)


def step_of_which_nobody_heard_is_not_found(place: Place) -> None:
    tier = place.tier()
    assert tier.complete_steps() == []
    assert absent(tier, 4)


def damaged_bytes_are_told_and_never_returned(place: Place) -> None:
    place.publish(place.tier(), sample(4), life(1))
    place.damage(4)
    found, memory = place.tier().open_step(4), MemoryTier()
    with pytest.raises(CorruptData):
        memory.publish(found)  # which reads all
    assert memory.complete_steps() == []


def publication_that_fails_leaves_what_was_there(place: Place) -> None:
    for broken, error in (("params/w", CorruptData), ("documents", HostStateError)):
        tier = place.tier()
        place.publish(tier, sample(4), life(1))
        step = sample(6)
        step.__class__, Failing.broken = Failing, broken
        with pytest.raises(error):
            place.publish(tier, step, life(1))
        assert absent(tier, 6)
        assert same(tier.open_step(4), sample(4))
        tier = place.tier()
        assert absent(tier, 6)
        assert tier.complete_steps() == [sample(4).save]
        assert same(tier.open_step(4), sample(4))


def step_that_failed_is_published_later(place: Place) -> None:
    tier, step = place.tier(), sample(6)
    step.__class__, Failing.broken = Failing, "params/w"
    with pytest.raises(CheckpointError):
        place.publish(tier, step, life(1))
    place.publish(tier, sample(6), life(1))
    assert same(tier.open_step(6), sample(6))


def step_goes_from_tier_to_tier(place: Place) -> None:
    tier, memory = place.tier(), MemoryTier()
    place.publish(tier, sample(4), life(1))
    memory.publish(tier.open_step(4))
    assert same(memory.open_step(4), sample(4))
    tier.remove(4, life(1))
    place.publish(tier, memory.open_step(4), life(1))
    assert same(tier.open_step(4), sample(4))


CASES: Sequence[Callable[[Place], None]] = (
    step_comes_back_as_it_was_published,
    boxes_make_up_each_leaf_and_crcs_are_theirs,
    host_states_are_named_and_read_one_by_one,
    newest_of_several_steps_counts,
    next_life_finds_the_step,
    step_saved_again_by_a_later_life_replaces_it,
    chain_takes_out_what_was_rolled_back,
    removed_step_is_gone_in_each_life,
    step_of_which_nobody_heard_is_not_found,
    damaged_bytes_are_told_and_never_returned,
    publication_that_fails_leaves_what_was_there,
    step_that_failed_is_published_later,
    step_goes_from_tier_to_tier,
)
NAMES: Mapping[str, Callable[[Place], None]] = {case.__name__: case for case in CASES}
