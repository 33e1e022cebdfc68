"""The link: what the devices of this process can do with host memory, found out once a process.

Three abilities, each with a fallback:

=====================  ===========================================  ===============================
ability                way                                          fallback
=====================  ===========================================  ===============================
map host memory        JAX's ``client.dma_map`` (from jax 0.10.2)   none: ``Link.mapper`` is None
read an array          ``Dma``: straight into mapped memory         "pinned_host", then "pageable"
write to a device      ``device_put`` of views of mapped memory     the same through JAX's staging
=====================  ===========================================  ===============================

A ``Link`` is used by three:

- Owners of memory (slots) take ``mapper`` and keep a ``state.mapped.MappedMemory`` of theirs.
- A restore calls ``write`` with views of that memory: one call for many arrays.
- A save (``state.staging``) reads by ``way``: "views" (CPU: a view replaces the transfer), "direct"
  (``dma``, into memory that is mapped), "pinned_host" or "pageable" (JAX's own transfers).

``find_link`` probes before it trusts: a way whose bytes differ from what was sent is not used, and
``LinkFacts.why`` says so. A TPU was never measured: JAX's own transfers serve it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import mmap
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental.layout import Layout

from emergency_ckpt.background import copy_threads
from emergency_ckpt.core.save.snapshot_plan import DeviceReads
from emergency_ckpt.errors import CheckpointError, MappingRefused
from emergency_ckpt.state.cuda_driver import cuda_dma
from emergency_ckpt.state.dtypes import PACKED_DTYPES
from emergency_ckpt.state.mapped import MappedMemory, Mapper, cut_into_pieces
from emergency_ckpt.state.tree import Leaf

Way = Literal["views", "direct", "pinned_host", "pageable"]
"""How the bytes of an array leave its device."""

_MATRIX = 2
"""Dimensions from which on arrays have more than one layout."""
_PROBE_BYTES = 8 << 20
_PROBE_TIMEOUT_S = 30.0
_RELEASE_TRIES, _RELEASE_PAUSE_S = 100, 0.0002
_PIECE_BYTES = 16 << 20
"""The most of an array that one thread copies at a time."""
_ALIGNMENT_BYTES = 64
"""Of memory that JAX takes for an array's own on CPU."""
_MAP_HINT = (
    "raise the limit of locked memory (`ulimit -l unlimited`, systemd's LimitMEMLOCK, or the"
    " container's), and the memory of its cgroup"
)


class DmaCopy(Protocol):
    """One copy that a device's DMA has begun. Thread-safe."""

    @property
    def has_ended(self) -> bool:
        """Return whether the bytes are there, or the copy has failed: ``wait`` does not block."""
        ...

    def wait(self) -> int:
        """Wait for the end; return the number of bytes copied. Raises what made it fail."""
        ...


class Dma(Protocol):
    """Copies bytes of an array's own buffer into mapped host memory. Thread-safe.

    It holds no reference: the caller keeps the array, and its bytes as they are, until the end.
    """

    def copy(self, source: jax.Array, offset: int, target: int, nbytes: int) -> DmaCopy:
        """Begin to copy ``nbytes`` from ``offset`` in the buffer to the address ``target``.

        ``source``: computed, on one device, in its default memory, in a linear layout. The target
        lies in one mapped piece. Does not block.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LinkFacts:
    """The result of the probe, for ``start.link``, ``eckpt doctor`` and the report of a restore.

    Attributes:
      platform, device: of JAX's first local device: "gpu", "NVIDIA H200".
      way: by which arrays are read, where nothing is said against it: ``Link.way``.
      maps: host memory is mapped for DMA.
      why: what stands against mapping or reading directly; empty when nothing does.
      gb_s: GB/s from a device to the host by ``way``, as a probe of some MiB found; 0 for "views",
        which move no bytes, and where the probe failed.
    """

    platform: str
    device: str
    way: Way
    maps: bool
    why: str = ""
    gb_s: float = 0.0


class Link:
    """The devices of this process and what they can do with host memory. Thread-safe.

    Attributes:
      mapper: maps host memory for all of them; None where nothing can be mapped.
      dma: reads arrays straight into mapped memory; None where that is not known to work.
      way: by which an array leaves its device where nothing else is said.
    """

    def __init__(
        self, facts: LinkFacts, mapper: Mapper | None = None, dma: Dma | None = None
    ) -> None:
        self.facts = facts
        self.mapper = mapper
        self.dma = dma
        self.way: Way = facts.way

    def ways_of(self, device: Any, leaf: Leaf) -> tuple[Way, Way]:
        """Return the way of a leaf's shards from ``device``, and the one without mapped memory."""
        if leaf.spec.dtype in PACKED_DTYPES:
            # Packed on the device, also on CPU; only JAX's own transfer writes one byte for each.
            return "pageable", "pageable"
        if self.way == "views":
            return "views", "pageable"
        by_jax: Way = _way_of_jax(device) if self.way == "direct" else self.way
        kind = leaf.sharding.memory_kind if leaf.sharding is not None else None
        is_own = kind in (None, device.default_memory().kind)
        return (self.way if is_own else by_jax), by_jax

    def reading(self, way: DeviceReads) -> Link:
        """Return this link with the user's choice of a way; "auto": as it was found."""
        if way == "auto" or (way == "pinned_host" and not _has_pinned_memory()):
            return self
        facts = dataclasses.replace(self.facts, way=way)
        return Link(_with_rate(facts, jax.local_devices()[0]), self.mapper)

    def write(
        self, views: Sequence[npt.NDArray[Any]], targets: Sequence[jax.sharding.Sharding | None]
    ) -> list[jax.Array]:
        """Return one array on one device for each C-contiguous view, all begun in one call.

        ``targets``: a sharding of one device for each, whose memory kind is kept; None: JAX's
        default device, to which the array is not committed. Does not wait for
        the transfers: the memory of the views may be written or unmapped once the results are ready
        (``jax.block_until_ready``), and then no result refers to it, on CPU either. Views of mapped
        memory that lie within one mapped piece are sent from where they are.
        """
        own = list(views)
        on_host = [n for n, target in enumerate(targets) if not _leaves_the_host(target)]
        for number, copy in zip(on_host, _private_copies([views[n] for n in on_host]), strict=True):
            own[number] = copy
        with jax.enable_x64(True), jax.transfer_guard("allow"):
            return jax.device_put(own, list(targets))


def _has_pinned_memory() -> bool:
    return all(
        "pinned_host" in {memory.kind for memory in device.addressable_memories()}
        for device in jax.local_devices()
    )


def begin_transfers(arrays: Sequence[jax.Array], ways: Sequence[Way]) -> list[jax.Array]:
    """Begin JAX's own transfers to the host; return arrays for ``np.asarray`` to wait for.

    ``arrays``: on one device each. ``ways``: "pinned_host" or "pageable" for each. Does not block.
    JAX keeps the copy of a pageable transfer for as long as the array that was asked for it. So the
    result is another array of the same device memory: the copy on the host is free after the end of
    the result and ``release_host_copies``, however long the given array lives.
    """
    begun = list(arrays)
    with jax.transfer_guard("allow"):
        pinned = [i for i, way in enumerate(ways) if way == "pinned_host"]
        if pinned:
            there = jax.device_put(
                [arrays[i] for i in pinned],
                [arrays[i].sharding.with_memory_kind("pinned_host") for i in pinned],
                # Not even for values in host memory already, since the next step may write there.
                may_alias=False,
            )
            for i, array in zip(pinned, there, strict=True):
                begun[i] = array
        for i, (array, way) in enumerate(zip(arrays, ways, strict=True)):
            if way != "pinned_host":
                begun[i] = jax.make_array_from_single_device_arrays(
                    array.shape, array.sharding, [array]
                )
                begun[i].copy_to_host_async()
    return begun


def release_host_copies(copies: Sequence[weakref.ref[npt.NDArray[Any]]]) -> None:
    """Free the memory of ``copies``, the results of pageable transfers that nobody uses any more.

    JAX hands that memory on to Python's next garbage collection, from a thread of its own, moments
    after the transfer. Blocks for such a moment, or for 20 ms where somebody does use a copy.
    """
    for _ in range(_RELEASE_TRIES):
        gc.collect(0)
        if all(copy() is None for copy in copies):
            return
        time.sleep(_RELEASE_PAUSE_S)


def is_linear(array: jax.Array) -> bool:
    """Return whether the buffer of an array on one device is its values in row-major order."""
    if array.dtype.name in PACKED_DTYPES or array.on_device_size_in_bytes() != array.nbytes:
        return False
    if array.ndim < _MATRIX:
        return True
    layout = getattr(getattr(array, "format", None), "layout", None)  # not in JAX's stubs
    return (
        isinstance(layout, Layout)
        and tuple(layout.major_to_minor) == tuple(range(array.ndim))
        and not layout.tiling
    )


def _leaves_the_host(target: jax.sharding.Sharding | None) -> bool:
    """Return whether an array there cannot be the memory that it is made from."""
    if target is None:
        if getattr(jax.config, "jax_default_device", None) is not None:
            return False  # it may be any
        target = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    (device,) = target.device_set
    kind = target.memory_kind
    return device.platform != "cpu" and kind in (None, device.default_memory().kind)


def _private_copies(views: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Return copies that JAX may take for the arrays' own memory: nobody else has them.

    ``may_alias=False`` does not help: jax 0.10 takes numpy's memory on CPU all the same. Several
    threads copy, since the system makes the pages of new memory meanwhile.
    """
    copies: list[npt.NDArray[Any]] = []
    pieces: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] = []
    for view in views:
        memory = np.empty(view.nbytes + _ALIGNMENT_BYTES, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        into, source = memory[start : start + view.nbytes], view.reshape(-1).view(np.uint8)
        copies.append(into.view(view.dtype).reshape(view.shape))
        for at in range(0, view.nbytes, _PIECE_BYTES):
            pieces.append((into[at : at + _PIECE_BYTES], source[at : at + _PIECE_BYTES]))
    remaining = iter(pieces)

    def copy_remaining() -> None:
        for into, source in remaining:  # the threads share it
            np.copyto(into, source)

    whole_pieces = sum(view.nbytes for view in views) // _PIECE_BYTES
    helpers = min(whole_pieces, copy_threads() - 1) if whole_pieces else 0
    with ThreadPoolExecutor(helpers or 1, "eckpt-copy") as pool:  # of threads that are asked for
        copied: list[Future[None]] = []
        with contextlib.suppress(RuntimeError):  # no more threads: those that started copy all
            for _ in range(helpers):
                copied.append(pool.submit(copy_remaining))
        copy_remaining()
        for future in copied:
            future.result()
    return copies


class ClientMapper:
    """Maps by JAX's own client, so that JAX knows memory that is mapped and stages nothing of it.

    The call holds the GIL, for about 0.04 s a GiB.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def map(self, address: int, nbytes: int) -> None:
        try:
            self._client.dma_map(address, nbytes)
        except Exception as error:
            raise MappingRefused(
                "map", f"{nbytes} bytes of host memory", str(error), hint=_MAP_HINT
            ) from error

    def unmap(self, address: int) -> None:
        self._client.dma_unmap(address)


_lock = threading.Lock()
_found: Link | None = None


def find_link() -> Link:
    """Return the link of this process, found out at the first call. Blocks then, for a moment.

    Initialises JAX's backend if nobody has: not for a look at a machine where a job runs.
    """
    global _found  # noqa: PLW0603 - once a process
    with _lock:
        if _found is None:
            with jax.transfer_guard("allow"):
                _found = probe(jax.local_devices())
        return _found


def probe(devices: Sequence[Any], mapper: Mapper | None = None, dma: Dma | None = None) -> Link:
    """Return the link of ``devices``, of which each ability was tried.

    ``mapper``, ``dma``: those to try; None for those of the platform.
    """
    link = _find_abilities(devices, mapper, dma)
    return Link(_with_rate(link.facts, devices[0]), link.mapper, link.dma)


def _with_rate(facts: LinkFacts, device: Any) -> LinkFacts:
    """Return ``facts`` with the rate of their way, where that is one of JAX's own transfers."""
    if facts.way not in {"pinned_host", "pageable"}:
        return facts
    try:
        return dataclasses.replace(facts, gb_s=_rate_by_jax(device, facts.way))
    except RuntimeError as error:
        why = f"a transfer by the way {facts.way!r} failed: {error}"
        return dataclasses.replace(facts, gb_s=0.0, why=f"{facts.why}; {why}".lstrip("; "))


@functools.cache
def _rate_by_jax(device: Any, way: Way) -> float:
    """Return the GB/s of a transfer by JAX's own ``way``, found out once a process."""
    seconds = 0.0
    with jax.transfer_guard("allow"):
        array = jax.block_until_ready(jax.device_put(np.zeros(_PROBE_BYTES, np.uint8), device))
        for _ in range(2):  # the second is timed: JAX allocates memory for the first
            began_s = time.perf_counter()
            (arrived,) = begin_transfers([array], [way])
            np.asarray(jax.block_until_ready(arrived))
            seconds = time.perf_counter() - began_s
    return array.nbytes / 1e9 / seconds


def _find_abilities(devices: Sequence[Any], mapper: Mapper | None, dma: Dma | None) -> Link:
    device = devices[0]
    facts = LinkFacts(device.platform, device.device_kind, "views", maps=False)
    if device.platform == "cpu" and mapper is None:
        return Link(dataclasses.replace(facts, why="arrays on CPU are host memory"))
    facts = dataclasses.replace(facts, way=_way_of_jax(device))
    if mapper is None:
        if not hasattr(device.client, "dma_map"):
            why = "this JAX cannot map host memory (jax 0.10.2 and later can)"
            return Link(dataclasses.replace(facts, why=why))
        mapper = ClientMapper(device.client)
    memory = mmap.mmap(-1, _PROBE_BYTES)
    landed = np.frombuffer(memory, np.uint8)
    mapped = MappedMemory(mapper, landed.ctypes.data, _PROBE_BYTES)
    try:
        for offset, nbytes in cut_into_pieces(_PROBE_BYTES):
            mapped.map(offset, nbytes)
    except MappingRefused as error:
        return Link(dataclasses.replace(facts, why=error.problem))
    try:
        if dma is None and device.platform == "gpu":
            dma = cuda_dma()
        if dma is None:
            why, gb_s = f"no direct read of {device.platform}", 0.0
        else:
            why, gb_s = _try_dma(devices, dma, landed)
    finally:
        mapped.unmap(_PROBE_TIMEOUT_S)
    facts = dataclasses.replace(facts, maps=True, why=why, gb_s=gb_s)
    if why:
        return Link(facts, mapper)
    return Link(dataclasses.replace(facts, way="direct"), mapper, dma)


def _way_of_jax(device: Any) -> Way:
    """Return the better of JAX's own transfers: a TPU's pinned memory grows and is never freed."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    return "pinned_host" if "pinned_host" in kinds and device.platform == "gpu" else "pageable"


def _try_dma(devices: Sequence[Any], dma: Dma, landed: npt.NDArray[np.uint8]) -> tuple[str, float]:
    """Return why ``dma`` is not to be used, or nothing; and the GB/s of the slowest device."""
    sent = np.random.default_rng(0).integers(0, 256, landed.nbytes, np.uint8)
    slowest = float("inf")
    for device in devices:
        seconds = 0.0
        array = jax.block_until_ready(jax.device_put(sent, device))
        for _ in range(2):  # the second is timed: the first makes streams
            landed[:] = 0
            began_s = time.perf_counter()
            try:
                copied = dma.copy(array, 0, landed.ctypes.data, landed.nbytes).wait()
            except (CheckpointError, OSError, RuntimeError) as error:
                return f"a direct read of {device} failed: {error}", 0.0
            seconds = time.perf_counter() - began_s
            if copied != landed.nbytes or not np.array_equal(landed, sent):
                return f"a direct read of {device} gave other bytes", 0.0
        slowest = min(slowest, landed.nbytes / 1e9 / seconds)
    return "", slowest
