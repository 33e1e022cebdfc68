"""What the tests of the native engine share."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import numpy as np

from emergency_ckpt import _native

SIZE_BYTES = 1 << 22
AMPLE_S = 60.0  # never reached: a bound for a test that would hang


def make_mapping(size_bytes: int = SIZE_BYTES, *, writable: bool = True) -> _native.Mapping:
    fd = os.memfd_create("eckpt_test")
    try:
        os.ftruncate(fd, size_bytes)
        return _native.Mapping(fd, size_bytes, writable=writable)
    finally:
        os.close(fd)


@dataclass
class Ends:
    sender: socket.socket
    receiver: socket.socket


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def contents(mapping: _native.Mapping, offset: int, nbytes: int) -> bytes:
    return mapping.view(offset, nbytes, None).tobytes()
