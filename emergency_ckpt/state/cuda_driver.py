"""Copies from a GPU into mapped host memory by the CUDA driver, on streams of their own.

JAX has no public way into memory that is given to it. The driver's interface is stable, in every
version of it since CUDA 4; ``state.link`` uses it only once a probe has brought equal bytes. The
address comes from ``unsafe_buffer_pointer``, which all versions of JAX have.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Generator
from typing import Any

import jax

_LIBRARY = "libcuda.so.1"
_ORDINAL_OF_POINTER = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: beside the stream on which JAX computes
_SLEEPING_WAIT, _NO_TIMING = 1, 2  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class CudaDriver:
    """Calls of the driver; each raises OSError with the driver's name of what is wrong."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self("cuInit", ctypes.c_uint(0))

    def __call__(self, function: str, *arguments: Any) -> None:
        code = self.code(function, *arguments)
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
            text = (name.value or b"unknown").decode()
            raise OSError(f"{function}: {text} ({code})")

    def code(self, function: str, *arguments: Any) -> int:
        """Return the code of a call, which releases the GIL; 0 for success."""
        return int(getattr(self._library, function)(*arguments))


class _Lane:
    """The context and the stream of one device, which live as long as the process."""

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        self._driver = driver
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        driver("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        # That of JAX, which is the device's primary one.
        driver("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.stream = ctypes.c_void_p()
        with self.current():
            driver("cuStreamCreate", ctypes.byref(self.stream), ctypes.c_uint(_NON_BLOCKING))

    @contextlib.contextmanager
    def current(self) -> Generator[None]:
        """Make the device's context that of this thread."""
        self._driver("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class CudaCopy:
    """As ``state.link.DmaCopy``."""

    def __init__(self, driver: CudaDriver, lane: _Lane, event: ctypes.c_void_p, nbytes: int):
        self._driver, self._lane, self._nbytes = driver, lane, nbytes
        self._event: ctypes.c_void_p | None = event
        self._lock = threading.Lock()
        self._error: OSError | None = None

    @property
    def has_ended(self) -> bool:
        with self._lock:
            if self._event is None:
                return True
            with self._lane.current():
                return self._driver.code("cuEventQuery", self._event) != _NOT_READY

    def wait(self) -> int:
        with self._lock:
            if self._event is not None:
                event, self._event = self._event, None
                try:
                    with self._lane.current():
                        self._driver("cuEventSynchronize", event)
                        self._driver("cuEventDestroy_v2", event)
                except OSError as error:
                    self._error = error
            if self._error is not None:
                raise self._error
            return self._nbytes


class CudaDma:
    """As ``state.link.Dma``, for all devices of the process."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._lanes: dict[int, _Lane] = {}

    def copy(self, source: jax.Array, offset: int, target: int, nbytes: int) -> CudaCopy:
        """As ``Dma.copy``."""
        begin = int(source.unsafe_buffer_pointer()) + offset
        lane = self._lane_of(begin)
        event = ctypes.c_void_p()
        with lane.current():
            flags = ctypes.c_uint(_SLEEPING_WAIT | _NO_TIMING)
            self._driver("cuEventCreate", ctypes.byref(event), flags)
            self._driver(
                "cuMemcpyDtoHAsync_v2",
                ctypes.c_void_p(target),
                ctypes.c_uint64(begin),
                ctypes.c_size_t(nbytes),
                lane.stream,
            )
            self._driver("cuEventRecord", event, lane.stream)
        return CudaCopy(self._driver, lane, event, nbytes)

    def _lane_of(self, address: int) -> _Lane:
        """Return the lane of the device that has ``address``, whatever number JAX gives it."""
        ordinal = ctypes.c_int()
        self._driver(
            "cuPointerGetAttribute",
            ctypes.byref(ordinal),
            ctypes.c_int(_ORDINAL_OF_POINTER),
            ctypes.c_uint64(address),
        )
        with self._lock:
            if ordinal.value not in self._lanes:
                self._lanes[ordinal.value] = _Lane(self._driver, ordinal.value)
            return self._lanes[ordinal.value]


def cuda_dma() -> CudaDma | None:
    """Return the direct copies of this machine's CUDA driver; None where there is no driver."""
    try:
        return CudaDma(CudaDriver(ctypes.CDLL(_LIBRARY)))
    except OSError:
        return None
