"""Calls of the CUDA driver, on a library in its place: no GPU is needed, and none is shown to work.

The order and the kinds of arguments are those of cuda.h. That bytes arrive on a real device is
shown by the probe of ``state.link`` there, and by the conformance suite of links.
"""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np
import pytest
from fake_link import FakeMachine

from emergency_ckpt.state.cuda_driver import CudaDma, CudaDriver, cuda_dma
from emergency_ckpt.state.link import probe

_NOT_READY, _LOST = 600, 719


class Library:
    """What this project calls of libcuda: copies are done when their event is waited for."""

    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.lost = False
        self.is_late = False
        self.events = 0
        self._waiting: dict[int, list[tuple[int, int, int]]] = {}

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuGetErrorName(self, code: Any, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_LAUNCH_FAILED"
        return 0

    def cuPointerGetAttribute(self, found: Any, attribute: Any, address: Any) -> int:
        assert attribute.value == 9
        found._obj.value = 3
        return 0

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        device._obj.value = ordinal.value + 10
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = device.value + 100
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self.contexts.pop()
        return 0

    def cuStreamCreate(self, stream: Any, flags: Any) -> int:
        assert (self.contexts, flags.value) == ([113], 1)
        stream._obj.value = 7
        return 0

    def cuEventCreate(self, event: Any, flags: Any) -> int:
        assert self.contexts == [113]
        assert flags.value == 3
        self.events += 1
        event._obj.value = 1000 + self.events
        return 0

    def cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, nbytes: Any, stream: Any) -> int:
        assert self.contexts == [113]
        self._waiting.setdefault(stream.value, []).append(
            (target.value, source.value, nbytes.value)
        )
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        assert stream.value == 7
        return 0

    def cuEventQuery(self, event: Any) -> int:
        return _NOT_READY if self.is_late else 0

    def cuEventSynchronize(self, event: Any) -> int:
        assert self.contexts == [113]
        if self.lost:
            return _LOST
        for copy in self._waiting.pop(7, ()):
            ctypes.memmove(*copy)
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:
        self.events -= 1
        return 0


def test_copies_arrive_and_leave_nothing_behind() -> None:
    library = Library()
    dma = CudaDma(CudaDriver(library))
    array = jax.block_until_ready(jax.device_put(np.arange(100, dtype=np.uint8)))
    target = np.zeros(64, np.uint8)
    library.is_late = True
    copy = dma.copy(array, 10, target.ctypes.data + 4, 50)
    assert not copy.has_ended
    library.is_late = False
    assert copy.wait() == copy.wait() == 50
    assert copy.has_ended
    assert target.tolist() == [0] * 4 + list(range(10, 60)) + [0] * 10
    assert (library.contexts, library.events) == ([], 0)


def test_lost_device_is_an_error_each_time() -> None:
    library = Library()
    dma = CudaDma(CudaDriver(library))
    array = jax.block_until_ready(jax.device_put(np.arange(100, dtype=np.uint8)))
    copy = dma.copy(array, 0, np.zeros(100, np.uint8).ctypes.data, 100)
    library.lost = True
    for _ in range(2):
        with pytest.raises(OSError, match=r"cuEventSynchronize: CUDA_ERROR_LAUNCH_FAILED \(719\)"):
            copy.wait()
    assert not library.contexts


def test_probe_takes_copies_of_equal_bytes_only() -> None:
    library = Library()
    link = probe(jax.local_devices()[:1], FakeMachine(), CudaDma(CudaDriver(library)))
    assert (link.way, link.facts.why) == ("direct", "")
    library.lost = True
    link = probe(jax.local_devices()[:1], FakeMachine(), CudaDma(CudaDriver(library)))
    assert link.way == "pageable"
    assert "CUDA_ERROR_LAUNCH_FAILED" in link.facts.why


def test_without_a_driver_there_are_no_direct_copies() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert cuda_dma() is None
    else:
        pytest.skip("this machine has a driver")
