"""Host memory that is mapped for DMA in pieces: what refuses, fails in the middle, or is forked."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from fake_link import FakeMachine
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.shard_layout import lay_out
from emergency_ckpt.errors import DeadlineExceeded, MappingRefused
from emergency_ckpt.state.mapped import MappedMemory, cut_into_pieces
from emergency_ckpt.types import LARGE_SHARD_BYTES, LeafSpec, ShardId

PAGE = mmap.PAGESIZE
LONG_S = 60.0
ADDRESS = 1 << 40
"""Of memory that is only mapped, never touched."""


def memory_of(machine: FakeMachine, pages: int) -> MappedMemory:
    return MappedMemory(machine, ADDRESS, pages * PAGE)


def assert_cover(pieces: list[tuple[int, int]], nbytes: int) -> None:
    at = 0
    for offset, size in pieces:
        assert offset == at
        assert size > 0
        assert size % PAGE == 0
        at += size
    assert at == -(-nbytes // PAGE) * PAGE


@given(
    sizes=st.lists(st.integers(0, 9 * PAGE), max_size=30),
    gaps=st.lists(st.integers(0, 2), min_size=30, max_size=30),
    tail=st.integers(0, 3 * PAGE),
    pages=st.integers(1, 5),
)
def test_pieces_cut_no_leaf_that_has_pages_of_its_own(
    sizes: list[int], gaps: list[int], tail: int, pages: int
) -> None:
    shards: list[tuple[int, int]] = []
    end = 0
    for size, gap in zip(sizes, gaps, strict=False):
        offset = (-(-end // PAGE) + gap) * PAGE
        shards.append((offset, size))
        end = offset + size
    pieces = cut_into_pieces(end + tail, shards, pages * PAGE)
    assert_cover(pieces, end + tail)
    inside = [
        [
            (offset, size)
            for offset, size in shards
            if size and begin <= offset and offset + size <= begin + nbytes
        ]
        for begin, nbytes in pieces
    ]
    assert sum(map(len, inside)) == sum(size > 0 for _, size in shards), "a leaf is cut"
    for (begin, nbytes), whole in zip(pieces, inside, strict=True):
        alone = [(begin, nbytes)] == [(offset, -(-size // PAGE) * PAGE) for offset, size in whole]
        assert nbytes <= pages * PAGE or alone


@given(
    sizes=st.lists(st.integers(0, 5 * PAGE), max_size=30),
    tail=st.integers(0, 3 * PAGE),
    pages=st.integers(1, 4),
)
def test_pieces_of_leaves_that_share_pages_are_bounded(
    sizes: list[int], tail: int, pages: int
) -> None:
    shards: list[tuple[int, int]] = []
    end = 0
    for size in sizes:
        offset = -(-end // 64) * 64
        shards.append((offset, size))
        end = offset + size
    pieces = cut_into_pieces(end + tail, shards, pages * PAGE)
    assert_cover(pieces, end + tail)
    largest = max(sizes, default=0)
    for _, nbytes in pieces:
        assert nbytes <= max(pages * PAGE, largest + 2 * PAGE)


def test_piece_of_a_large_leaf_enlarges_no_other() -> None:
    leaf, large = 64 << 20, 8 << 30
    shards = [(0, large), *((large + i * leaf, leaf) for i in range(256))]
    memory = MappedMemory(FakeMachine(), ADDRESS, large + 256 * leaf)
    memory.want(shards)
    assert memory.missing == [(0, large), *((large + i * 4 * leaf, 4 * leaf) for i in range(64))]


@given(st.lists(st.integers(0, 3 << 18), min_size=1, max_size=12), st.integers(64, 256))
def test_pieces_of_a_slot_cut_small_shards_alone(sizes: list[int], pages: int) -> None:
    """A counter in front of the large shards moves none of them off its page."""
    specs = [LeafSpec(f"{i:02}", "uint8", (size,)) for i, size in enumerate(sizes)]
    pairs = zip(specs, sizes, strict=True)
    layout = lay_out(specs, [(ShardId(spec.path, ((0, size),)), size) for spec, size in pairs])
    assert layout.size_bytes <= sum(-(-size // PAGE) * PAGE for size in sizes)
    pieces = cut_into_pieces(layout.size_bytes, layout.places, pages * PAGE)
    for offset, nbytes in layout.places:
        holders = [1 for at, size in pieces if at <= offset and offset + nbytes <= at + size]
        assert holders or nbytes < LARGE_SHARD_BYTES


def test_pieces_end_where_shards_do_or_where_the_smallest_is_cut() -> None:
    aligned = [(i * 3 * PAGE, 3 * PAGE) for i in range(4)]
    assert cut_into_pieces(12 * PAGE, aligned, 7 * PAGE) == [(0, 6 * PAGE), (6 * PAGE, 6 * PAGE)]
    half = PAGE // 2
    shards = [(0, 3 * PAGE + half), (3 * PAGE + half, PAGE), (4 * PAGE + half, 4 * PAGE)]
    assert cut_into_pieces(9 * PAGE, shards, 5 * PAGE)[0] == (0, 4 * PAGE)


def test_mapping_that_fails_in_the_middle_keeps_what_is_mapped() -> None:
    machine = FakeMachine()
    machine.limit_bytes = 3 * PAGE
    memory = memory_of(machine, 4)
    memory.map(0, 2 * PAGE)
    with pytest.raises(MappingRefused):
        memory.map(2 * PAGE, 2 * PAGE)
    assert sum(machine.mapped.values()) == 2 * PAGE
    assert memory.parts(PAGE, PAGE) == [(PAGE, PAGE)]
    assert memory.parts(PAGE, 2 * PAGE) is None
    memory.unmap(10.0)
    assert not machine.mapped


def test_parts_end_where_pieces_meet() -> None:
    memory = memory_of(FakeMachine(), 4)
    memory.map(0, 2 * PAGE)
    memory.map(2 * PAGE, 2 * PAGE)
    assert memory.parts(100, 3 * PAGE) == [(100, 2 * PAGE - 100), (2 * PAGE, PAGE + 100)]
    assert memory.parts(100, 50) == [(100, 50)]


def test_range_is_mapped_once() -> None:
    machine = FakeMachine()
    memory = memory_of(machine, 4)
    memory.map(0, PAGE)
    memory.map(0, PAGE)
    with pytest.raises(ValueError, match="in part"):
        memory.map(0, 2 * PAGE)
    with pytest.raises(ValueError, match="not in"):
        memory.map(3 * PAGE, 2 * PAGE)
    assert machine.mapped == {ADDRESS: PAGE}


def test_after_unmap_nothing_is_mapped_or_begun() -> None:
    machine = FakeMachine()
    memory = memory_of(machine, 4)
    memory.map(0, PAGE)
    memory.unmap(10.0)
    memory.unmap(10.0)
    memory.map(0, PAGE)
    with memory.transfer() as may_begin:
        assert not may_begin
    assert not machine.mapped


def test_unmap_gives_up_while_a_transfer_runs_and_keeps_all() -> None:
    machine = FakeMachine()
    memory = memory_of(machine, 4)
    memory.map(0, PAGE)
    with memory.transfer(), pytest.raises(DeadlineExceeded):
        memory.unmap(0.01)
    assert machine.mapped == {ADDRESS: PAGE}
    memory.unmap(10.0)
    assert not machine.mapped


@pytest.mark.filterwarnings("ignore:os.fork")
def test_forked_child_leaves_the_mapping_alone() -> None:
    machine = FakeMachine()
    memory = memory_of(machine, 4)
    memory.map(0, PAGE)
    child = os.fork()
    if child == 0:
        with memory.transfer() as may_begin:
            pass
        memory.unmap(10.0)
        memory.map(PAGE, PAGE)
        os._exit(0 if machine.mapped == {ADDRESS: PAGE} and not may_begin else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    memory.unmap(10.0)
    assert not machine.mapped


def test_without_a_mapper_nothing_is_mapped() -> None:
    memory = MappedMemory(None, ADDRESS, 4 * PAGE)
    memory.want()
    memory.wait(0, PAGE, LONG_S)
    memory.map(0, PAGE)
    assert memory.parts(0, PAGE) is None
    memory.unmap(10.0)


def test_wait_ends_with_the_mapping_of_its_range() -> None:
    machine = FakeMachine()
    memory = memory_of(machine, 4)
    memory.wait(0, PAGE, LONG_S)  # nobody has said that it will be mapped
    memory.want([(0, 2 * PAGE), (2 * PAGE, 2 * PAGE)], 2 * PAGE)
    assert memory.missing == [(0, 2 * PAGE), (2 * PAGE, 2 * PAGE)]
    memory.map(0, 2 * PAGE)
    memory.wait(PAGE, PAGE, LONG_S)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(memory.wait, PAGE, 2 * PAGE, LONG_S)
        waiting = wait([rest], 0.2).not_done
        memory.map(2 * PAGE, 2 * PAGE)
        assert waiting
        rest.result(LONG_S / 2)
    memory.want()
    assert memory.missing == []
    memory.unmap(10.0)


@pytest.mark.parametrize("end", ["given up", "too late", "unmapped"])
def test_nobody_waits_for_what_will_not_be_mapped(end: str) -> None:
    memory = memory_of(FakeMachine(), 4)
    memory.want()
    if end == "given up":
        memory.give_up()
    elif end == "unmapped":
        memory.unmap(10.0)
        memory.want()
    else:
        memory.wait(0, PAGE, 0.01)
    assert memory.missing == []
    memory.wait(0, PAGE, LONG_S)
