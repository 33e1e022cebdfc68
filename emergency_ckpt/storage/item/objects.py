"""The small files of a step (objects, in a bucket), each written under a precondition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import tensorstore

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage.calls import result_of, wait_for
from emergency_ckpt.storage.orbax_names import STEP_METADATA
from emergency_ckpt.storage.orbax_reader import kvstore_of


class _Write(NamedTuple):
    data: bytes
    future: Any


Writes = dict[str, _Write]
"""Writes under way, by the names of the objects. ``settle`` or ``generations`` must be called."""


class StepObjects:
    """The files below one folder. All methods block until storage has answered, however late.

    Otherwise a write might take effect after the step was cleared, and show in a later save of the
    step. TensorStore retries after temporary errors; other errors of TensorStore, ValueError, pass
    through. A reply may be lost, and the precondition then refuses the repeated write: the bytes in
    storage show whose write they are.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder.rstrip("/")
        self._store = result_of(tensorstore.KvStore.open(kvstore_of(self._folder)))
        self._absent = _generation_of_nothing()

    def begin(
        self, objects: Mapping[str, bytes], over: Mapping[str, bytes] | None = None
    ) -> Writes:
        """Begin to write ``objects``, given by name, all at once. Does not block.

        ``over``: the generations of existing objects to replace; the other objects must not exist.
        """
        over = over or {}
        writes: Writes = {}
        for name, data in objects.items():
            future = self._store.write(name, data, if_equal=over.get(name, self._absent))
            writes[name] = _Write(data, future)
        return writes

    def settle(self, writes: Writes) -> None:
        """Wait until storage has answered, whatever the answer: the save has failed already."""
        for write in writes.values():
            wait_for(write.future)

    def generations(self, writes: Writes) -> dict[str, bytes]:
        """Return the generation of each object by its name; PersistentTierError after a failure."""
        self.settle(writes)
        return {name: self._generation_of(name, write) for name, write in writes.items()}

    def _generation_of(self, name: str, write: _Write) -> bytes:
        generation = result_of(write.future).generation
        if generation:
            return generation
        result = result_of(self._store.read(name))
        if result.state == "value" and result.value == write.data:
            return result.stamp.generation
        raise self._lost(name)

    def write(
        self, objects: Mapping[str, bytes], over: Mapping[str, bytes] | None = None
    ) -> dict[str, bytes]:
        """Write ``objects`` as ``begin`` does; return the generation of each.

        PersistentTierError when another process has written or removed one of the objects.
        """
        return self.generations(self.begin(objects, over))

    def commit(
        self,
        names: Iterable[str],
        incarnation: str,
        metadata: bytes,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the files by which Orbax counts the step; ``check`` is called before each write.

        The files are removed again if Orbax's metadata are not ``metadata``, as when a newer life
        has the place: PersistentTierError.
        """
        text = f"Checkpoint commit was successful by incarnation {incarnation}".encode()
        written: dict[str, bytes] = {}
        for name in names:
            check()
            written |= self.write({name: text})
        if self.read([STEP_METADATA]).get(STEP_METADATA) != metadata:
            self.remove(dict(reversed(written.items())))
            raise self._lost(STEP_METADATA)

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of the objects that exist."""
        reads = {name: self._store.read(name) for name in names}
        results = {name: result_of(future) for name, future in reads.items()}
        return {name: result.value for name, result in results.items() if result.state == "value"}

    def remove(self, generations: Mapping[str, bytes]) -> None:
        """Remove objects that still have these generations, in this order."""
        for name, generation in generations.items():
            result_of(self._store.write(name, None, if_equal=generation))

    def _lost(self, name: str) -> PersistentTierError:
        problem = "it was written or removed by another process meanwhile"
        hint = "only one job may save in a directory; the next save tries again"
        return PersistentTierError("save", f"{self._folder}/{name}", problem, hint=hint)


def _generation_of_nothing() -> bytes:
    """Return TensorStore's generation of a key without a value."""
    memory = result_of(tensorstore.KvStore.open("memory://"))
    return result_of(memory.read("")).stamp.generation
