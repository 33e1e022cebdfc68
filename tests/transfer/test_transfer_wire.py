"""Frames and macs as PROTOCOL.md shows them, and contents that do not hold together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transfer_support import Shares, keys_by_hand, stretched_by_hand

from emergency_ckpt.core.limits import MAX_RANGES, MAX_SHARDS
from emergency_ckpt.errors import ProtocolViolation
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.transfer import ShardTarget, wire
from emergency_ckpt.transfer.client import requests_for
from emergency_ckpt.transfer.handshake import session_keys
from emergency_ckpt.transfer.sealing import Direction
from emergency_ckpt.transfer.stream import pieces

MIB = 1 << 20
PROTOCOL = Path(wire.__file__).with_name("PROTOCOL.md")


def test_keys_of_the_worked_example() -> None:
    secret = b"0123456789abcdef0123456789abcdef"
    client, server = Shares(bytes(range(32))), Shares(bytes(range(32, 64)))
    joint = client.joint(server.share)
    assert joint == server.joint(client.share)
    shares = client.share, server.share
    keys = session_keys(Credentials("run-a", secret), "0" * 32, *shares, joint)
    assert tuple(keys) == tuple(keys_by_hand(*shares, joint, key=secret))
    sealed = Direction(keys.from_client, peer="peer").seal_frame(b'{"type":"get_inventory"}')
    example = re.findall(r"^    \S.*?  ([0-9a-f]+)$", PROTOCOL.read_text(), re.MULTILINE)
    stretched = stretched_by_hand("run-a", secret)
    assert [each.hex() for each in (stretched, *shares, joint, *keys, sealed)] == example


def test_protocol_page_is_at_most_120_lines() -> None:
    assert len(PROTOCOL.read_text().splitlines()) <= 120


def test_frame_of_the_worked_example() -> None:
    frame = wire.GetShards(digest="ab" * 32, ranges=[(2, 0, 65536), (3, 4096, 10)])
    expected = (
        b"\x00\x00\x00\x84"
        b'{"type":"get_shards","digest":"' + b"ab" * 32 + b'",'
        b'"ranges":[[2,0,65536],[3,4096,10]]}'
    )
    assert wire.encode_frame(frame) == expected
    assert wire.decode_json(wire.REQUEST, expected[4:], "peer") == frame


def test_largest_request_fits_a_frame() -> None:
    largest = (MAX_SHARDS - 1, (1 << 63) - 1, (1 << 63) - 1)
    frame = wire.GetShards(digest="ab" * 32, ranges=[largest] * MAX_RANGES)
    encoded = wire.encode_frame(frame)
    assert wire.decode_json(wire.REQUEST, encoded[4:], "peer") == frame


def test_frame_nested_without_end_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        wire.decode_json(wire.REQUEST, b'{"ranges":' + b"[" * 60_000, "peer")


@pytest.mark.parametrize("streams", [1, 2, 7])
@pytest.mark.parametrize(
    "sizes", [(), (0,), (1,), (64 * MIB,), (1 << 30, 3), (5,) * 5000, (0, 4 * MIB, 0, 4 * MIB - 1)]
)
def test_requests_cover_every_byte_once(streams: int, sizes: tuple[int, ...]) -> None:
    wanted = [ShardTarget(index, nbytes, 0) for index, nbytes in enumerate(sizes)]
    reached = [0] * len(sizes)
    for parts in requests_for(wanted, streams):
        assert 1 <= len(parts) <= MAX_RANGES
        assert sum(part.nbytes for part in parts) <= 64 * MIB
        for part in parts:
            assert part.nbytes > 0
            assert part.start == reached[part.position]
            reached[part.position] += part.nbytes
    assert reached == list(sizes)


def test_pieces_are_bounded_and_in_order() -> None:
    found = list(pieces([(100, 10), (0, 0), (50, 25), (7, 3)], 12))
    assert found == [
        [(0, 100, 10), (2, 50, 2)],
        [(2, 52, 12)],
        [(2, 64, 11), (3, 7, 1)],
        [(3, 8, 2)],
    ]
    assert list(pieces([], 12)) == []
