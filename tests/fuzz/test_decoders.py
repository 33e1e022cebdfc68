"""Every decoder refuses altered bytes by its typed errors; `make fuzz` searches for longer.

The files below ``corpus`` are inputs that once raised anything else, and such that reach more code
than the seeds, found by `make fuzz`, which begins from them.
"""

from __future__ import annotations

import random
from pathlib import Path

import growth
import msgspec
import pytest
from fuzz_places import ALL, PLACES
from fuzz_targets import TARGETS, Target

CORPUS = Path(__file__).resolve().parent / "corpus"
ALTERED = 400
MAX_CORPUS_BYTES = 200_000
_FRAGMENTS = (
    *(b"null", b"-1", b"1e999", b"99999999999999999999", b"true", b'""', b"[]", b"{}", b"[[[[[["),
    *(b"\\ud800", b"\xff", b"\x00", b"%s", b"../", b"18446744073709551616", b"\\u0000", b","),
)


def altered(data: bytes, chance: random.Random) -> bytes:
    """One to four changes: a bit, a cut, a repeat, or a fragment over or between bytes."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at : at + chance.randint(1, 16)]
            case 2:
                out[at:at] = out[at : at + chance.randint(1, 64)]
            case 3:
                out[at:at] = chance.choice(_FRAGMENTS)
            case _:
                fragment = chance.choice(_FRAGMENTS)
                out[at : at + len(fragment)] = fragment
    return bytes(out)


@pytest.mark.parametrize("name", TARGETS)
def test_decoder_accepts_its_seeds(name: str) -> None:
    assert TARGETS[name].seeds
    for seed in TARGETS[name].seeds:
        TARGETS[name].decode(seed)


@pytest.mark.dear
@pytest.mark.parametrize("name", ALL)
def test_decoder_of_altered_bytes_raises_typed_errors(name: str) -> None:
    target, chance = ALL[name], random.Random(name)
    for seed in target.seeds:
        for _ in range(ALTERED // 10 if name in PLACES else ALTERED):
            target.run(altered(seed, chance))


def test_decoders_of_the_corpus_raise_typed_errors() -> None:
    for path in sorted(CORPUS.glob("*/*")):
        ALL[path.parent.name].run(path.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TARGETS, *PLACES])
def test_time_of_decoder_grows_with_its_input(name: str) -> None:
    """Of the seeds and one size; `make fuzz` has more. A time is asserted in the night alone."""
    assert list(growth.alarms(name, ALL[name], sizes=growth.SIZES[:1])) == []


@pytest.mark.slow
def test_square_of_its_input_is_found_in_a_decoder() -> None:
    """One that puts integer keys of a document into a dict, however many have one hash."""

    def decode(data: bytes) -> object:
        return {int(key): 0 for key in msgspec.json.decode(data)}

    target = Target(decode, [b'{"1":0}'], (Exception,))
    families = {alarm.family for alarm in growth.alarms("keys", target, sizes=growth.SIZES[:1])}
    assert families == {"integer keys of one hash"}


def test_corpus_is_small_and_has_the_names_of_targets() -> None:
    sizes = {path: path.stat().st_size for path in CORPUS.glob("*/*")}
    assert {path.parent.name for path in sizes} <= set(ALL)
    assert sum(sizes.values()) <= MAX_CORPUS_BYTES
