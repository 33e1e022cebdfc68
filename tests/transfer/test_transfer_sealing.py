"""Seals of one direction: what opens is what was sealed, once, in order, of its kind."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.errors import AuthenticationFailed
from emergency_ckpt.transfer.security.sealing import SEAL_KEY_BYTES, TAG_BYTES, Direction, buffer

KEY = os.urandom(SEAL_KEY_BYTES)
encrypts = st.booleans()


def pair(encrypts: bool, key: bytes = KEY) -> tuple[Direction, Direction]:
    return (
        Direction(key, encrypts=encrypts, peer="peer"),
        Direction(key, encrypts=encrypts, peer="peer"),
    )


def sealed_piece(direction: Direction, data: bytes) -> bytearray:
    out = bytearray(data) + bytes(TAG_BYTES)
    direction.seal_piece(memoryview(data), memoryview(out))
    return out


def opened_piece(direction: Direction, sealed: bytes) -> bytes:
    target = bytearray(len(sealed))
    return bytes(direction.open_piece(memoryview(bytearray(sealed)), memoryview(target)))


@given(encrypts=encrypts, parts=st.lists(st.tuples(st.booleans(), st.binary(max_size=100))))
def test_direction_frames_and_pieces_come_back(
    encrypts: bool, parts: list[tuple[bool, bytes]]
) -> None:
    sending, receiving = pair(encrypts)
    for is_frame, data in parts:
        if is_frame:
            sealed = sending.seal_frame(data)
            assert receiving.open_frame(sealed[:4], sealed[4:]) == data
        else:
            assert opened_piece(receiving, sealed_piece(sending, data)) == data


@given(
    encrypts=encrypts,
    data=st.binary(min_size=1, max_size=100),
    at=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
def test_direction_any_bit_changed_is_refused(
    encrypts: bool, data: bytes, at: int, bit: int
) -> None:
    sending, receiving = pair(encrypts)
    frame = bytearray(sending.seal_frame(data))
    frame[at % len(frame)] ^= 1 << bit
    with pytest.raises(AuthenticationFailed):
        receiving.open_frame(bytes(frame[:4]), bytes(frame[4:]))
    piece = sealed_piece(sending, data)
    piece[at % len(piece)] ^= 1 << bit
    with pytest.raises(AuthenticationFailed):
        opened_piece(receiving, piece)


@pytest.mark.parametrize("encrypts", [False, True])
def test_direction_piece_in_place_of_frame_is_refused(encrypts: bool) -> None:
    """Both kinds cover the same bytes here: only the nonce tells them apart."""
    sending, receiving = pair(encrypts)
    clear = (3).to_bytes(4, "big") + b"{ }"
    piece = bytes(sealed_piece(sending, clear))
    with pytest.raises(AuthenticationFailed):
        receiving.open_frame(piece[:4], piece[4:])


@pytest.mark.parametrize("encrypts", [False, True])
def test_direction_other_key_or_mode_is_refused(encrypts: bool) -> None:
    sending, _ = pair(encrypts)
    sealed = sending.seal_frame(b"{}")
    for receiving in (pair(encrypts, os.urandom(SEAL_KEY_BYTES))[1], pair(not encrypts)[1]):
        with pytest.raises(AuthenticationFailed):
            receiving.open_frame(sealed[:4], sealed[4:])


def test_buffer_in_use_is_nobody_elses() -> None:
    with buffer() as first, buffer() as second:
        first.view[:3], second.view[:3] = b"one", b"two"
        assert bytes(first.mapping.view(0, 3, first)) == b"one"
        assert bytes(second.mapping.view(0, 3, second)) == b"two"
    before = len(os.listdir("/proc/self/fd"))
    with buffer(), buffer(), buffer():
        assert len(os.listdir("/proc/self/fd")) == before
