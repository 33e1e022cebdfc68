"""Inputs that grow, made from the seeds of decoders, and those whose time grows with the square.

A family replaces one place in a JSON seed by something of about n parts. Seeds that are no JSON are
repeated, to 16 bytes for each part. The time is that of the process's CPU, the least of three,
without the garbage collector: four times the parts may take at most seven times as long. The
oracle looks at inputs above 50 ms alone, since less says nothing on a machine that does other work
too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from fuzz_targets import Target

SIZES = (1024, 4096)
_TIMES = 4
_MAX_GROWTH = 7.0
_LOOKED_AT_S = 0.05
_LEAST_S = 0.002
_RUNS = 3
_EQUAL_HASHES = (1 << 61) - 1  # Python's hash of an integer is its remainder by this prime
_DEPTH = 60

Put = Callable[[bytes], Any]


class Place(NamedTuple):
    """A place in a document: its name, the text there, and what puts another text there."""

    name: str
    text: bytes
    put: Put


class Alarm(NamedTuple):
    """An input of which four times as much took more than seven times as long."""

    target: str
    place: str
    family: str
    parts: int
    small_s: float
    large_s: float

    def __str__(self) -> str:
        small = f"{self.parts} in {self.small_s:.3f} s"
        large = f"{_TIMES} times as many in {self.large_s:.3f} s"
        return f"{self.target}: {self.family} at /{self.place}: {small}, {large}"


def _listed(parts: Iterator[bytes]) -> bytes:
    return b"[%s]" % b",".join(parts)


def _mapped(keys: Iterator[int | str], value: bytes) -> bytes:
    return b"{%s}" % b",".join(b'"%s":%s' % (str(key).encode(), value) for key in keys)


def _of_one_hash(n: int) -> Iterator[int]:
    return (i * _EQUAL_HASHES for i in range(n))


def _items(text: bytes) -> list[bytes]:
    """Return the texts of the items of a list or dict, or the text of another value itself."""
    value = msgspec.json.decode(text)
    items = [*value.values()] if isinstance(value, dict) else value
    return [msgspec.json.encode(item) for item in items] if isinstance(items, list) else [text]


def _first(text: bytes) -> bytes:
    return (_items(text) or [b"0"])[0]


def _tagged_keys(n: int, key: bytes) -> bytes:
    """Return a dict in the form of host states, of keys with one hash."""
    return b'{"__dict__":%s}' % _listed(b"[%s,0]" % (key % number) for number in _of_one_hash(n))


FAMILIES: Mapping[str, Callable[[bytes, int], bytes]] = {
    "a list repeated": lambda text, n: _listed(part for _ in range(n) for part in _items(text)[:9]),
    "empty lists": lambda _, n: _listed(iter([b"[]"] * n)),
    "integer keys of one hash": lambda text, n: _mapped(_of_one_hash(n), _first(text)),
    "keys": lambda text, n: _mapped((f"key {i}" for i in range(n)), _first(text)),
    "one key repeated": lambda text, n: _mapped((f"k{i % 2}" for i in range(n)), _first(text)),
    "text with escapes": lambda _, n: b'"%s"' % (b"a\\u00e9\\n\\\\" * n),
    "text that opens brackets": lambda _, n: b'"%s"' % (b'[{\\"' * n),
    "an integer of many digits": lambda _, n: b"9" * n,
    "a fraction of many digits": lambda _, n: b"0." + b"1" * n,
    "nested values": lambda text, n: _listed(
        iter([b"[" * _DEPTH + _first(text) + b"]" * _DEPTH] * (n // _DEPTH))
    ),
    "pairs with __int__": lambda _, n: _tagged_keys(n, b'{"__int__":"%x"}'),
    "pairs with __tuple__": lambda _, n: _tagged_keys(n, b'{"__tuple__":[{"__int__":"%x"}]}'),
    "hexadecimal digits": lambda _, n: b'{"__int__":"%s"}' % (b"f" * 8 * n),
    "base64": lambda _, n: b'{"__bytes__":"%s"}' % (b"AAAA" * 8 * n),
}


def places_in(value: Any, name: str = "") -> Iterator[Place]:
    """Yield every place of a JSON value; those of equal name, as of two items, are alike."""
    yield Place(name, msgspec.json.encode(value), msgspec.Raw)
    children: list[tuple[str, Any, Callable[[Any], Any]]] = []
    if isinstance(value, dict):
        for key, child in value.items():
            children.append((key, child, lambda new, key=key: {**value, key: new}))
    elif isinstance(value, list):
        for i, child in enumerate(value):
            children.append(("*", child, lambda new, i=i: [*value[:i], new, *value[i + 1 :]]))
    for key, child, within in children:
        for place in places_in(child, f"{name}{key}/"):
            put = place.put
            yield place._replace(put=lambda text, put=put, within=within: within(put(text)))


def _document(seed: bytes) -> tuple[bytes, Any]:
    """Return the byte before a JSON document, if there is one, and its value; None: no JSON."""
    for prefix in (seed[:0], seed[:1]):
        try:
            return prefix, msgspec.json.decode(seed[len(prefix) :])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return b"", None


def _repeated(seed: bytes, n: int) -> bytes:
    """Return a seed again and again, to about n times the length of a number."""
    return seed * max(1, 16 * n // max(1, len(seed)))


def inputs_of(seeds: Sequence[bytes]) -> Iterator[tuple[str, str, Callable[[int], bytes]]]:
    """Yield the name of a place, of a family, and what makes its input of n parts."""
    seen: set[str] = set()
    for number, seed in enumerate(seeds):
        prefix, value = _document(seed)
        if not isinstance(value, (dict, list)):
            yield f"seed {number}", "repeated", lambda n, seed=seed: _repeated(seed, n)
        for place in places_in(value) if value is not None else ():
            kind = type(msgspec.json.decode(place.text)).__name__
            if (name := f"{place.name}{kind}") in seen:
                continue
            seen.add(name)
            for family, make in FAMILIES.items():

                def grown(n: int, prefix=prefix, place=place, make=make) -> bytes:
                    return prefix + msgspec.json.encode(place.put(make(place.text, n)))

                yield place.name, family, grown


def _cpu_s(target: Target, data: bytes, runs: int) -> float:
    """Return the least CPU time of so many runs."""
    least_s = float("inf")
    gc.disable()
    try:
        for _ in range(runs):
            began_s = time.process_time()
            target.run(data)
            least_s = min(least_s, time.process_time() - began_s)
    finally:
        gc.enable()
    return least_s


def alarms(
    name: str, target: Target, corpus: Sequence[bytes] = (), sizes: Sequence[int] = SIZES
) -> Iterator[Alarm]:
    """Yield the inputs, made from the seeds of ``target`` and ``corpus``, that take too long."""
    for place, family, grown in inputs_of([*target.seeds, *corpus]):
        for parts in sizes:
            large = grown(_TIMES * parts)
            if _cpu_s(target, large, 1) <= _LOOKED_AT_S:
                continue
            small_s = _cpu_s(target, grown(parts), _RUNS)
            large_s = _cpu_s(target, large, _RUNS)
            if large_s > max(_LOOKED_AT_S, _MAX_GROWTH * max(small_s, _LEAST_S)):
                yield Alarm(name, place, family, parts, small_s, large_s)
                break
