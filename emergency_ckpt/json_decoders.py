"""One decoder of JSON for each type, whichever threads ask for it.

msgspec (0.22) finds out what a struct's fields are when it is first decoded. A second thread that
decodes the same struct meanwhile reads what is half written, and the process dies of SIGSEGV. So
decoders are made here alone, one at a time, and ruff forbids msgspec's own ways to one.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from msgspec.json import Decoder

__all__ = ["Decoder", "decoder_of"]

_T = TypeVar("_T")

_making = threading.Lock()
_made: dict[Any, Decoder[Any]] = {}


def decoder_of(kind: type[_T] | Any) -> Decoder[_T]:
    """Return the decoder of ``kind``: a struct, a union, or another type that msgspec decodes.

    All threads may use it at once.
    """
    found = _made.get(kind)
    if found is None:
        with _making:
            found = _made[kind] = _made.get(kind) or Decoder(kind)
    return found
