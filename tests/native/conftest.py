"""Fixtures of the native engine's tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from native_parts import SIZE_BYTES, Ends, make_mapping, random_bytes

from emergency_ckpt import _native


@pytest.fixture
def mapping() -> Iterator[_native.Mapping]:
    made = make_mapping()
    yield made
    made.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    sender, receiver = socket.socketpair()
    yield Ends(sender, receiver)
    sender.close()
    receiver.close()


@pytest.fixture
def filled() -> _native.Mapping:
    mapping = make_mapping()
    _native.copy_crc32c(mapping, [(random_bytes(SIZE_BYTES), 0)], 2)
    return mapping
