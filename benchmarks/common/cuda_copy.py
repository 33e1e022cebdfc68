"""Copy from a GPU into pinned memory by the CUDA runtime: the upper limit for device to host."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import jax

_DEVICE_TO_HOST = 2  # cudaMemcpyKind
_PACKAGES = ("nvidia.cu13", "nvidia.cuda_runtime")


class CudaMissing(Exception):
    """This machine has no CUDA runtime."""


def find_runtime() -> str:
    """Return path or name of libcudart, from NVIDIA's packages or the system; CudaMissing."""
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for place in (spec.submodule_search_locations or ()) if spec else ():
            if found := sorted(Path(place).glob("lib/libcudart.so*")):
                return str(found[-1])
    if name := ctypes.util.find_library("cudart"):
        return name
    raise CudaMissing("no libcudart, neither in NVIDIA's Python packages nor on the system")


class PinnedCopy:
    """Pinned host memory, allocated once, and copies into it. A context manager."""

    def __init__(self, size_bytes: int, device_ordinal: int) -> None:
        """Raise CudaMissing without a CUDA runtime, RuntimeError when a CUDA call fails."""
        self._runtime = ctypes.CDLL(find_runtime())
        self._call("cudaSetDevice", ctypes.c_int(device_ordinal))
        self._memory = ctypes.c_void_p()
        self._call(
            "cudaHostAlloc",
            ctypes.byref(self._memory),
            ctypes.c_size_t(size_bytes),
            ctypes.c_uint(0),
        )
        self._size_bytes = size_bytes

    def __enter__(self) -> PinnedCopy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._call("cudaFreeHost", self._memory)

    def copy(self, arrays: Sequence[jax.Array]) -> None:
        """Copy arrays that are ready on the device, in sequence. Blocks."""
        assert self._memory.value is not None
        offset = 0
        for array in arrays:
            if offset + array.nbytes > self._size_bytes:
                raise ValueError(f"{offset + array.nbytes} bytes do not fit")
            self._call(
                "cudaMemcpy",
                ctypes.c_void_p(self._memory.value + offset),
                ctypes.c_void_p(array.unsafe_buffer_pointer()),
                ctypes.c_size_t(array.nbytes),
                ctypes.c_int(_DEVICE_TO_HOST),
            )
            offset += array.nbytes

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._runtime, name)(*arguments):
            raise RuntimeError(f"{name} failed with CUDA error {code}")
