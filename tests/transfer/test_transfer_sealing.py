"""Seals of one direction: what opens is what was sealed, once, in order, of its kind."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.errors import AuthenticationFailed
from emergency_ckpt.transfer.security.sealing import SEAL_KEY_BYTES, TAG_BYTES, Direction, buffer

KEY = os.urandom(SEAL_KEY_BYTES)


def pair(key: bytes = KEY) -> tuple[Direction, Direction]:
    return (
        Direction(key, peer="peer"),
        Direction(key, peer="peer"),
    )


def sealed_piece(direction: Direction, data: bytes) -> bytearray:
    out = bytearray(len(data) + TAG_BYTES)
    direction.seal_piece(memoryview(data), memoryview(out))
    return out


def opened_piece(direction: Direction, sealed: bytes) -> bytes:
    target = bytearray(len(sealed))
    return bytes(direction.open_piece(memoryview(bytearray(sealed)), memoryview(target)))


@given(parts=st.lists(st.tuples(st.booleans(), st.binary(max_size=100))))
def test_direction_frames_and_pieces_come_back(
    parts: list[tuple[bool, bytes]],
) -> None:
    sending, receiving = pair()
    for is_frame, data in parts:
        if is_frame:
            sealed = sending.seal_frame(data)
            assert receiving.open_frame(sealed[:4], sealed[4:]) == data
        else:
            assert opened_piece(receiving, sealed_piece(sending, data)) == data


@given(
    data=st.binary(min_size=1, max_size=100),
    at=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
def test_direction_any_bit_changed_is_refused(data: bytes, at: int, bit: int) -> None:
    sending, receiving = pair()
    frame = bytearray(sending.seal_frame(data))
    frame[at % len(frame)] ^= 1 << bit
    with pytest.raises(AuthenticationFailed):
        receiving.open_frame(bytes(frame[:4]), bytes(frame[4:]))
    piece = sealed_piece(sending, data)
    piece[at % len(piece)] ^= 1 << bit
    with pytest.raises(AuthenticationFailed):
        opened_piece(receiving, piece)


def test_direction_piece_in_place_of_frame_is_refused() -> None:
    """Both kinds cover the same bytes here: only the nonce tells them apart."""
    sending, receiving = pair()
    clear = (3).to_bytes(4, "big") + b"{ }"
    piece = bytes(sealed_piece(sending, clear))
    with pytest.raises(AuthenticationFailed):
        receiving.open_frame(piece[:4], piece[4:])


def test_direction_other_key_is_refused() -> None:
    sending, _ = pair()
    sealed = sending.seal_frame(b"{}")
    with pytest.raises(AuthenticationFailed):
        pair(os.urandom(SEAL_KEY_BYTES))[1].open_frame(sealed[:4], sealed[4:])


def test_buffer_in_use_is_nobody_elses() -> None:
    with buffer() as first, buffer() as second:
        first.view[:3], second.view[:3] = b"one", b"two"
        assert bytes(first.mapping.view(0, 3, first)) == b"one"
        assert bytes(second.mapping.view(0, 3, second)) == b"two"
    before = len(os.listdir("/proc/self/fd"))
    with buffer(), buffer(), buffer():
        assert len(os.listdir("/proc/self/fd")) == before
