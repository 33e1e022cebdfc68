"""One decoder of JSON for each type, whichever threads ask for it.

msgspec before 0.23 finds out what a struct's fields are when it is first decoded. A second thread
that decodes the same struct meanwhile reads what is half written, and the process dies of SIGSEGV.
So decoders are made here alone, one at a time, and ruff forbids msgspec's own ways to one.

The time of a decoder grows with the length of its input, and not with its square. Keys of a dict
may therefore be no integers without bounds, of which any number have the same hash.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, TypeVar

from msgspec import inspect
from msgspec.json import Decoder

__all__ = ["Decoder", "decoder_of"]

_T = TypeVar("_T")

_making = threading.Lock()
_made: dict[Any, Decoder[Any]] = {}


def decoder_of(kind: type[_T] | Any) -> Decoder[_T]:
    """Return the decoder of ``kind``: a struct, a union, or another type that msgspec decodes.

    All threads may use it at once.
    """
    decoder = _made.get(kind)
    if decoder is None:
        with _making:
            decoder = _made.get(kind)
            if decoder is None:
                for key in _hashed(inspect.type_info(kind), set()):
                    if isinstance(key, inspect.IntType) and key.lt is None and key.le is None:
                        raise TypeError(f"keys of a dict in {kind} are integers without bounds")
                decoder = _made[kind] = Decoder(kind)
    return decoder


def _hashed(kind: inspect.Type, seen: set[type]) -> Iterator[inspect.Type]:
    """Yield the types of the keys of dicts, and of the items of sets, in ``kind``."""
    parts: tuple[inspect.Type, ...] = ()
    match kind:
        case inspect.DictType(key_type=key, value_type=value):
            yield key
            parts = key, value
        case inspect.SetType(item_type=item) | inspect.FrozenSetType(item_type=item):
            yield item
            parts = (item,)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            parts = (item,)
        case inspect.TupleType(item_types=items):
            parts = items
        case inspect.UnionType(types=kinds):
            parts = kinds
        case (
            inspect.StructType(cls=cls, fields=fields)
            | inspect.DataclassType(cls=cls, fields=fields)
            | inspect.NamedTupleType(cls=cls, fields=fields)
        ) if cls not in seen:
            seen.add(cls)
            parts = tuple(field.type for field in fields)
        case _:
            pass
    for part in parts:
        yield from _hashed(part, seen)
