"""What every link keeps: on CPU, on a fake machine with its faults, and on whatever is there."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import jax
import numpy as np
import pytest
from fake_link import FakeMachine
from state_samples import DEVICE_DTYPES, random_bits

from emergency_ckpt.state import link as links
from emergency_ckpt.state.link import Link, find_link, probe
from emergency_ckpt.state.mapped import MappedMemory


def refusing() -> Link:
    machine = FakeMachine()
    machine.limit_bytes = 0
    return machine.link()


LINKS: dict[str, Callable[[], Link]] = {
    "of this machine": find_link,
    "cpu": lambda: probe(jax.local_devices(backend="cpu")),
    "fake": lambda: FakeMachine().link(),
    "fake, refuses to map": refusing,
}
each_link = pytest.mark.parametrize("make", LINKS.values(), ids=LINKS)


class Memory:
    """Host memory of whole pages, mapped by ``link`` where it maps."""

    def __init__(self, link: Link, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.bytes = np.frombuffer(self._memory, np.uint8)
        self.mapped = MappedMemory(link.mapper, self.bytes.ctypes.data, nbytes)
        self.mapped.map(0, nbytes)


def bits(value: jax.Array | np.ndarray) -> bytes:
    """The bytes of the elements; of packed integers the bits above the value are no part of it."""
    memory = np.ascontiguousarray(value).view(np.uint8)
    signed = {"int2": 3, "int4": 15}.get(value.dtype.name)
    return (memory if signed is None else memory & signed).tobytes()


@each_link
def test_written_arrays_keep_none_of_the_memory(make: Callable[[], Link]) -> None:
    link = make()
    memory = Memory(link, 1 << 16)
    sent = [random_bits((3, 5), dtype, seed) for seed, dtype in enumerate(DEVICE_DTYPES)]
    views: list[np.ndarray] = []
    for number, value in enumerate([*sent, np.zeros((0, 4), np.float32)]):
        place = memory.bytes[number * 1024 : number * 1024 + value.nbytes]
        view = place.view(value.dtype).reshape(value.shape)
        view[...] = value
        views.append(view)
    device = jax.local_devices()[-1]
    there = jax.sharding.SingleDeviceSharding(device)
    written = jax.block_until_ready(link.write(views, [there] * len(views)))
    memory.bytes[:] = 0xFF
    memory.mapped.unmap(10.0)
    assert [bits(array) for array in written[:-1]] == [bits(value) for value in sent]
    assert written[-1].shape == (0, 4)
    assert all(array.devices() == {device} for array in written)


@each_link
def test_written_arrays_have_the_memory_kind_of_their_targets(make: Callable[[], Link]) -> None:
    link = make()
    memory = Memory(link, 4096)
    memory.bytes[:] = 7
    device = jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    targets = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in kinds]
    written = jax.block_until_ready(link.write([memory.bytes[:64]] * len(kinds), targets))
    memory.bytes[:] = 8
    assert [array.sharding.memory_kind for array in written] == kinds
    assert {bits(array) for array in written} == {bytes([7]) * 64}


@each_link
def test_direct_reads_bring_any_part_of_an_array(make: Callable[[], Link]) -> None:
    link = make()
    if link.dma is None:
        assert link.way != "direct"
        assert link.facts.why
        return
    memory = Memory(link, 1 << 20)
    for device in jax.local_devices():
        value = random_bits((500, 64), "uint32", device.id)
        array = jax.block_until_ready(jax.device_put(value, device))
        with memory.mapped.transfer() as may_begin:
            assert may_begin
            copy = link.dma.copy(array, 256, memory.mapped.address + 64, value.nbytes - 256)
            assert copy.wait() == value.nbytes - 256
            assert copy.has_ended
        assert memory.bytes[64 : value.nbytes - 192].tobytes() == value.tobytes()[256:]


@each_link
def test_large_arrays_are_written_whole(make: Callable[[], Link]) -> None:
    """Several threads copy pieces of 16 MiB, of arrays of which some are no multiple of that."""
    link = make()
    sizes = [40 << 20, (16 << 20) + 3, 0, 5]
    memory = Memory(link, sum(sizes) // mmap.PAGESIZE * mmap.PAGESIZE + mmap.PAGESIZE)
    memory.bytes[:] = random_bits(memory.bytes.shape, "uint8", 7)
    places = np.cumsum([0, *sizes])
    views = [memory.bytes[at : at + size] for at, size in zip(places, sizes, strict=False)]
    there = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    written = jax.block_until_ready(link.write(views, [there] * len(views)))
    assert [bits(array) for array in written] == [view.tobytes() for view in views]


def test_arrays_are_written_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "copy_threads", lambda: 2)
    sent = random_bits((17 << 20,), "uint8", 0)
    usual = threading.stack_size(1 << 46)  # more than any address space has
    try:
        (array,) = LINKS["cpu"]().write([sent], [None])
    finally:
        threading.stack_size(usual)
    np.testing.assert_array_equal(array, sent)


def test_probe_says_what_it_found() -> None:
    cpu, fake, refused = LINKS["cpu"]().facts, LINKS["fake"]().facts, refusing().facts
    assert (cpu.way, cpu.maps, cpu.gb_s) == ("views", False, 0.0)
    assert (fake.way, fake.maps, fake.why) == ("direct", True, "")
    assert fake.gb_s > 0
    assert (refused.way, refused.maps) == ("pageable", False)
    assert refused.gb_s > 0
    assert "limit" in refused.why


@pytest.mark.parametrize("silent", [False, True])
def test_probe_does_not_trust_a_direct_read_of_other_bytes(silent: bool) -> None:
    machine = FakeMachine()
    machine.short_bytes, machine.silent = 1, silent
    link = machine.link()
    assert link.dma is None
    assert (link.way, link.facts.maps) == ("pageable", True)
    assert "other bytes" in link.facts.why


def test_transfer_that_fails_in_the_probe_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no premapped memory")

    links._rate_by_jax.cache_clear()
    monkeypatch.setattr(links, "begin_transfers", fail)
    facts = FakeMachine().link().reading("pinned_host").facts
    assert (facts.way, facts.gb_s) == ("pinned_host", 0.0)
    assert "pinned_host" in facts.why
    assert "no premapped memory" in facts.why


def test_probe_names_the_device_that_it_cannot_read() -> None:
    machine = FakeMachine()
    machine.lost = {jax.local_devices()[1].id}
    link = machine.link()
    assert link.dma is None
    assert str(jax.local_devices()[1]) in link.facts.why
    assert not machine.mapped


def test_unmap_waits_for_a_copy_that_runs() -> None:
    machine = FakeMachine()
    link = machine.link()
    assert link.dma is not None
    memory = Memory(link, 1 << 16)
    array = jax.block_until_ready(jax.device_put(np.arange(1024), jax.local_devices()[0]))
    machine.gate.clear()
    ended = threading.Event()
    with memory.mapped.transfer():
        copy = link.dma.copy(array, 0, memory.mapped.address, array.nbytes)
        thread = threading.Thread(target=lambda: (memory.mapped.unmap(60.0), ended.set()))
        thread.start()
        with memory.mapped.transfer() as first:
            pass
        while first:  # until the other thread has begun to unmap
            with memory.mapped.transfer() as first:
                pass
        assert machine.mapped
        assert not ended.is_set()
        machine.gate.set()
        copy.wait()
    thread.join()
    assert ended.is_set()
    assert not machine.mapped
