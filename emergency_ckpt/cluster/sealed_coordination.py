"""A coordinator whose values carry a mark that only the processes of this start can make.

JAX's coordination service does not authenticate its clients. A value that another writer forged,
copied from another key, or replayed raises ForgedValue here, for all users. A value that another
client deleted is absent as if it had never been set, and a wait for it ends at its deadline.

Barriers carry no mark.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping

from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.core.keys import OpenedValue, open_value, seal_value
from emergency_ckpt.errors import CoordinationError, ForgedValue

_REMEMBERED = 1 << 16
_SHOWN_CHARS = 200
_FOREIGN = "it has no mark of this start of the job: another client wrote it"
_OLD = "an older value was written back in its place"
_HINT = "keep the port of JAX's coordinator on the job's own network"


class SealedCoordinator:
    """Coordinator over another one, with ``key``, which all processes of this start have.

    ``key`` must belong to this start alone; otherwise values recorded in an earlier one would be
    accepted. Thread-safe. Every method raises the errors of the other coordinator, and those that
    return a value raise ForgedValue, which names the key, for a forged one.
    """

    def __init__(self, coordinator: Coordinator, key: bytes) -> None:
        self._coordinator = coordinator
        self._sealing_key = key
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._ticks = itertools.count()
        self._newest: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()

    @property
    def process_index(self) -> int:
        return self._coordinator.process_index

    @property
    def process_count(self) -> int:
        return self._coordinator.process_count

    def put(self, key: str, value: bytes) -> None:
        try:
            self._coordinator.put(key, self._sealed(key, 0, value))
        except CoordinationError as error:
            try:
                self.find(key)
            except ForgedValue as forged:
                raise forged from error  # it is why ours could not be set
            except CoordinationError:
                pass  # the first error is more specific
            raise

    def replace(self, key: str, value: bytes) -> None:
        self._coordinator.replace(key, self._sealed(key, next(self._numbers), value))

    def get(self, key: str, timeout_s: float) -> bytes:
        began = next(self._ticks)
        return self._opened("wait for", key, self._coordinator.get(key, timeout_s), began)

    def find(self, key: str) -> bytes | None:
        began = next(self._ticks)
        found = self._coordinator.find(key)
        return None if found is None else self._opened("look for", key, found, began)

    def list(self, prefix: str) -> Mapping[str, bytes]:
        began = next(self._ticks)
        return {
            rest: self._opened("list", f"{prefix}/{rest}", sealed, began)
            for rest, sealed in self._coordinator.list(prefix).items()
        }

    def delete(self, prefix: str) -> None:
        self._coordinator.delete(prefix)

    def barrier(self, name: str, timeout_s: float) -> None:
        self._coordinator.barrier(name, timeout_s)

    def _sealed(self, key: str, number: int, value: bytes) -> bytes:
        return seal_value(self._sealing_key, key, OpenedValue(number, self.process_index, value))

    def _opened(self, operation: str, key: str, sealed: bytes, began: int) -> bytes:
        opened = open_value(self._sealing_key, key, sealed)
        if opened is None:
            raise ForgedValue(operation, _shown(key), _FOREIGN, hint=_HINT)
        if opened.number and self._is_old(key, opened, began):
            raise ForgedValue(operation, _shown(key), _OLD, hint=_HINT)
        return opened.value

    def _is_old(self, key: str, opened: OpenedValue, began: int) -> bool:
        """Return whether a newer value of its writer was seen at ``key`` before this read began.

        Records this value. A value that another thread has read meanwhile does not count, because
        that read may have begun later.
        """
        place = key, opened.writer
        with self._lock:
            newest, seen = self._newest.pop(place, (0, 0))
            if opened.number > newest:
                self._newest[place] = opened.number, next(self._ticks)
            else:
                self._newest[place] = newest, seen
            if len(self._newest) > _REMEMBERED:
                self._newest.popitem(last=False)
        return opened.number < newest and seen < began


def _shown(key: str) -> str:
    """Return ``key`` for an error, since names below a prefix may be an attacker's choice."""
    return ascii(key[:_SHOWN_CHARS])[1:-1]
