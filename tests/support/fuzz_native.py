"""Calls of the native module with hostile arguments, as a target of fuzzing.

An input is a program: each step takes a function and arguments of it by the next bytes. A call
returns what a model of the mapping gives, or raises what `_native.pyi` documents and changes
nothing.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from fuzz_targets import Target

from emergency_ckpt import _native

_REFUSALS = (ValueError, TypeError, OSError)
_MAX_BYTES = 5000
_POOL = np.random.default_rng(17).bytes(1 << 16)
_EDGES = (0, 1, 2**31, 2**32, 2**63, 2**64)
# All but the first two are refused.
_TIMEOUTS = (0.0, 1e-4, -1.0, 1.1e6, float("nan"), float("inf"), -float("inf"), 1e308)


class _Refused(Exception):
    """The module refused the arguments by an error that it documents."""


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call the module; only its own errors count as refusals, and no error of an oracle."""
    try:
        return function(*arguments, **named)
    except _REFUSALS as error:
        raise _Refused from error


class _Release:
    """An integer that changes the state of others when a call asks for its value."""

    def __init__(self, act: Callable[[], object], value: int) -> None:
        self._act = act
        self._value = value

    def __index__(self) -> int:
        self._act()
        return self._value


class _Input:
    """The bytes of an input as values; after its end all are zero."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def done(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def at_most(self, limit: int) -> int:
        return (self.byte() << 8 | self.byte()) % (limit + 1)

    def integer(self, limit: int) -> int:
        """Return one in [0, limit], or, less often, any near an edge."""
        if (kind := self.byte()) < 160:
            return self.at_most(limit)
        edge = (*_EDGES, limit, 1 << 20_000)[kind % 8]
        return (-edge if kind % 3 == 0 else edge) + self.byte() % 5 - 2

    def number(self, limit: int, act: Callable[[], object]) -> Any:
        """Return mostly an integer, also what is none."""
        match self.byte():
            case kind if kind < 200:
                return self.integer(limit)
            case kind if kind < 220:
                return _Release(act, self.integer(limit))
            case kind:
                others = (None, 1.0, "1", b"1", True, np.int64(self.byte()), np.float32(1), [], 1j)
                return others[kind % len(others)]

    def timeout(self) -> Any:
        match self.byte():
            case kind if kind < 240:
                return _TIMEOUTS[kind % len(_TIMEOUTS) if kind >= 160 else kind % 2]
            case kind:
                return (None, "1", [], 10**400)[kind % 4]

    def buffer(self) -> Any:
        """Return bytes or another object that has them, or none."""
        start, nbytes = self.at_most(1 << 15), self.at_most(_MAX_BYTES)
        data = _POOL[start : start + nbytes]
        array = np.frombuffer(data, np.uint8)
        match self.byte():
            case kind if kind < 120:
                return data
            case kind if kind < 200:
                return (bytearray(data), memoryview(data), array, array.reshape(1, -1))[kind % 4]
            case kind if kind < 240:  # not contiguous, or other items
                square = np.frombuffer(_POOL, np.float32, 64).reshape(8, 8)
                return (array[::2], square.T, memoryview(data)[::-1], square)[kind % 4]
            case kind:
                released = memoryview(data)
                released.release()
                return (released, None, 7, "text", [1, 2])[kind % 5]

    def ranges(self, limit: int, act: Callable[[], object]) -> Any:
        """Return pairs of an offset and a length, some of them malformed."""
        pairs: list[Any] = [
            (self.number(limit, act), self.number(limit // 3, act)) for _ in range(self.byte() % 6)
        ]
        match self.byte():
            case kind if kind < 220:
                return tuple(pairs) if kind % 2 else pairs
            case kind if kind < 240:
                odd = ((), (1,), (1, 2, 3), None, 7, "ab", {0: 1, 1: 2}, [0, 1], b"ab", {1, 2})
                return [*pairs, odd[kind % len(odd)]]
            case kind:
                return (None, 7, {}, iter(pairs), b"", np.array([[0, 1], [2, 3]]))[kind % 6]


class _Place(NamedTuple):
    """A mapping, its file, and the bytes that both should have."""

    fd: int
    mapping: _native.Mapping
    model: bytearray
    writable: bool

    def check(self) -> None:
        """Raise AssertionError where the file has other bytes than the model."""
        assert os.pread(self.fd, len(self.model) + 1, 0)[: len(self.model)] == bytes(self.model)


@contextmanager
def _place(size_bytes: int, writable: bool) -> Iterator[_Place]:
    fd = os.memfd_create("eckpt_fuzz")
    try:
        model = bytearray(_POOL[:size_bytes])
        os.pwrite(fd, model, 0)
        mapping = _native.Mapping(fd, size_bytes, writable=writable)
        yield _Place(fd, mapping, model, writable)
        mapping.close()
    finally:
        os.close(fd)


def _plain(ranges: Any) -> list[tuple[int, int]]:
    """Return accepted ranges as integers."""
    return [(int(_value(pair[0])), int(_value(pair[1]))) for pair in ranges]


def _value(number: Any) -> int:
    return number._value if isinstance(number, _Release) else number.__index__()


def _bytes_of(buffer: Any) -> bytes:
    return memoryview(buffer).tobytes()


def _sum(given: _Input, place: _Place) -> None:
    size = len(place.model)
    ranges = given.ranges(size, place.mapping.close)
    crcs = _call(_native.crc32c_ranges, place.mapping, ranges, given.number(4, place.mapping.close))
    expected = [bytes(place.model[at : at + nbytes]) for at, nbytes in _plain(ranges)]
    assert [len(each) for each in expected] == [nbytes for _, nbytes in _plain(ranges)]
    assert crcs == [google_crc32c.value(each) for each in expected]


def _copy(given: _Input, place: _Place) -> None:
    size, copies, taken = len(place.model), list[Any](), list[range]()
    for _ in range(given.byte() % 5):
        buffer, offset = given.buffer(), given.number(size, place.mapping.close)
        try:
            target = range(_value(offset), _value(offset) + len(_bytes_of(buffer)))
        except (AttributeError, TypeError, ValueError):  # refused below
            target = range(0)
        if any(each.start < target.stop and target.start < each.stop for each in taken):
            continue  # the callers' rule
        taken.append(target)
        copies.append((buffer, offset))
    crcs = _call(_native.copy_crc32c, place.mapping, copies, given.number(4, place.mapping.close))
    assert place.writable or not copies
    for (buffer, offset), crc in zip(copies, crcs, strict=True):
        data, at = _bytes_of(buffer), _value(offset)
        assert 0 <= at <= at + len(data) <= size
        assert crc == google_crc32c.value(data)
        place.model[at : at + len(data)] = data


def _view(given: _Input, place: _Place) -> None:
    size = len(place.model)
    offset = given.number(size, place.mapping.close)
    nbytes = given.number(size, place.mapping.close)
    view = _call(place.mapping.view, offset, nbytes, place)
    at = _value(offset)
    assert view.nbytes == _value(nbytes)
    assert at + view.nbytes <= size
    assert view.tobytes() == bytes(place.model[at : at + view.nbytes])


def _prefault(given: _Input, place: _Place) -> None:
    size = len(place.model)
    numbers = [given.number(limit, place.mapping.close) for limit in (size, size, 4)]
    _call(_native.prefault, place.mapping, *numbers, written=bool(given.byte() & 1))
    assert place.writable
    assert _value(numbers[0]) + _value(numbers[1]) <= size


def _crc(given: _Input, place: _Place) -> None:
    buffer, value = given.buffer(), given.number(2**32 - 1, place.mapping.close)
    crc = _call(_native.crc32c, buffer, value)
    data = _bytes_of(buffer)
    assert crc == google_crc32c.extend(_value(value), data)
    assert crc == _native.crc32c_combine(_value(value), google_crc32c.value(data), len(data))


def _combine(given: _Input, place: _Place) -> None:
    first, second, third = (given.number(2**32 - 1, place.mapping.close) for _ in range(3))
    nbytes, more = given.number(2**20, place.mapping.close), given.integer(2**20)
    joined = _call(_native.crc32c_combine, first, second, nbytes)
    if 0 <= _value(nbytes) + more < 2**64:
        tail = _call(_native.crc32c_combine, second, third, more)
        assert _native.crc32c_combine(joined, third, more) == _native.crc32c_combine(
            first, tail, _value(nbytes) + more
        )


@contextmanager
def _ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def _send(given: _Input, place: _Place) -> None:
    ranges = given.ranges(len(place.model), place.mapping.close)
    with _ends() as (near, far):
        fd = (near.fileno(), place.fd, -1, 2**31, 2**64, None)[max(0, given.byte() - 250)]
        _call(_native.send_ranges, fd, place.mapping, ranges, given.timeout())
        expected = b"".join(bytes(place.model[at : at + nbytes]) for at, nbytes in _plain(ranges))
        received = far.recv(len(expected), socket.MSG_WAITALL) if expected else b""
    assert received == expected


def _receive(given: _Input, place: _Place) -> None:
    """Receive what was sent into the mapping."""
    data = _POOL[: given.at_most(_MAX_BYTES)]
    with _ends() as (near, far):
        far.sendall(data)
        if given.byte() & 1:
            far.shutdown(socket.SHUT_WR)
        ranges = given.ranges(len(place.model), place.mapping.close)
        given.byte()  # of no meaning, as that below: what the corpus has behind it keeps its place
        timeout = given.timeout()
        given.byte()
        try:
            crcs = _call(_native.receive_ranges, near.fileno(), place.mapping, ranges, timeout)
        except _Refused as refused:
            if isinstance(refused.__cause__, OSError):  # which bytes had come is open
                place.model[:] = os.pread(place.fd, len(place.model), 0)
            raise
    plain = _plain(ranges)
    assert place.writable or not plain
    for (at, nbytes), crc in zip(plain, crcs, strict=True):
        part, data = data[:nbytes], data[nbytes:]
        assert len(part) == nbytes
        if not _overlap(plain):
            assert crc == google_crc32c.value(part)
        end = min(at + nbytes, len(place.model))
        place.model[at:end] = part[: max(0, end - at)]


def _overlap(ranges: list[tuple[int, int]]) -> bool:
    ordered = sorted((at, at + nbytes) for at, nbytes in ranges if nbytes)
    return any(end > begin for (_, end), (begin, _) in itertools.pairwise(ordered))


def _open(given: _Input, place: _Place) -> None:
    """Map the file again, also with sizes that it does not have."""
    size = given.number(len(place.model), place.mapping.close)
    again = _call(_native.Mapping, place.fd, size, writable=bool(given.byte() & 1))
    assert again.size_bytes == _value(size)
    assert again.size_bytes <= os.fstat(place.fd).st_size


def _close(_given: _Input, place: _Place) -> None:
    place.mapping.close()


_CALLS: tuple[Callable[[_Input, _Place], None], ...] = (
    *(_sum, _copy, _view, _prefault, _crc, _combine, _send, _receive, _open, _close),
)


def _run(data: bytes) -> None:
    given = _Input(data)
    with _place(given.at_most(_MAX_BYTES), writable=given.byte() < 240) as place:
        for _ in range(8):
            if given.done():
                break
            with suppress(_Refused):
                _CALLS[given.byte() % len(_CALLS)](given, place)
            place.check()


# One valid call of each function over 256 bytes, and then calls of all with other arguments.
_SEED_PLACE = b"\x01\x00\x00"
NATIVE: Mapping[str, Target] = {
    "native_calls": Target(
        _run,
        [
            *(_SEED_PLACE + bytes([index]) + bytes(40) for index in range(len(_CALLS))),
            _SEED_PLACE + bytes(range(256)),
        ],
        (),
    ),
}
