"""Ready values for ``host_state_remap``: conversions of iterators to a job of another size.

The user chooses one, because a state does not tell how the data were split. Each converts the
iterators anywhere in the host state; all other values must be equal on all processes. A state that
cannot be converted is a HostStateError with the reason, and nothing is restored.

No conversion is possible for iterators of ``tf.data``, whose state only TensorFlow can read, nor
for Grain's ``IndexSampler``, which gives each process one contiguous part of the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from emergency_ckpt.core.position_remap import Unmovable, move_position, same_state
from emergency_ckpt.errors import HostStateError
from emergency_ckpt.state import host_state_codec as codec
from emergency_ckpt.state.host_state_codec import Payload, as_stateful

__all__ = ["same_on_all", "smallest_position"]

MoveState = Callable[[Sequence[Any], int, int], Any]
"""``move(states of all former processes in order, process index, process count) -> state``."""


@dataclasses.dataclass(frozen=True)
class IteratorRemap:
    """A ``host_state_remap`` that converts each iterator on its own, anywhere in the host state.

    All other values must be equal on all former processes, and stay as they are.
    """

    name: str
    move: MoveState = dataclasses.field(repr=False, compare=False)

    def __call__(self, states: Sequence[Any], index: int, count: int) -> Any:
        """Return an iterator's state from its states on all former processes. HostStateError."""
        return self._moved(states, index, count, "host_state")

    def payload(self, payloads: Sequence[Payload], index: int, count: int) -> Payload:
        """Return the payload of process ``index`` of ``count``. HostStateError names the place."""
        return self._payload(payloads, index, count, "host_state")

    def _moved(self, states: Sequence[Any], index: int, count: int, path: str) -> Any:
        try:
            return self.move(states, index, count)
        except Unmovable as error:
            hint = "set your own host_state_remap, or start as many processes as at the save"
            raise HostStateError("remap", path, f"{self.name}: {error}", hint=hint) from error

    def _payload(self, payloads: Sequence[Payload], index: int, count: int, path: str) -> Payload:
        first = payloads[0]
        if all(codec.tag_of(payload) == codec.STATE for payload in payloads):
            states = [codec.from_payload(payload) for payload in payloads]
            moved = codec.to_payload(self._moved(states, index, count, path), path)
            return {codec.STATE: moved}
        if all(payload == first for payload in payloads) and not codec.holds_state(first):
            return first
        dicts = [codec.dict_items(payload) for payload in payloads]
        if dicts[0] is not None:
            keys = [key for key, _ in dicts[0]]
            if all(found is not None and [key for key, _ in found] == keys for found in dicts):
                columns = [[item for _, item in found or ()] for found in dicts]
                items = [
                    self._payload(column, index, count, f"{path}[{key!r}]")
                    for key, column in zip(keys, zip(*columns, strict=True), strict=True)
                ]
                return codec.dict_payload(zip(keys, items, strict=True))
        rows = [codec.sequence_items(payload) for payload in payloads]
        if rows[0] is not None:
            kind, length = rows[0][0], len(rows[0][1])
            if all(r is not None and (r[0], len(r[1])) == (kind, length) for r in rows):
                lists = [row[1] for row in rows if row is not None]
                items = [
                    self._payload(column, index, count, f"{path}[{place}]")
                    for place, column in enumerate(zip(*lists, strict=True))
                ]
                return codec.sequence_payload(kind, items)
        raise HostStateError(
            "remap",
            path,
            f"{self.name} converts iterators only; here the former processes have different values",
            hint="set your own host_state_remap, which combines them",
        )


def payload_for(target: object, value: object, path: str = "host_state") -> Payload:
    """Return the payload of ``value``, with a state where ``target`` has an object for it.

    The result of a remap, in which an iterator's state is a plain value, can then be applied.
    """
    if as_stateful(target) is not None:
        return {codec.STATE: codec.to_payload(value, path)}
    if isinstance(target, dict) and isinstance(value, dict):
        targets, values = cast("dict[Any, Any]", target), cast("dict[Any, Any]", value)
        return codec.dict_payload(
            (key, payload_for(targets.get(key), item, f"{path}[{key!r}]"))
            for key, item in values.items()
        )
    if isinstance(target, list | tuple) and type(target) is type(value):  # pyright: ignore[reportUnknownArgumentType]
        targets, values = cast("Sequence[Any]", target), cast("Sequence[Any]", value)
        if len(targets) == len(values):
            items = [
                payload_for(old, new, f"{path}[{place}]")
                for place, (old, new) in enumerate(zip(targets, values, strict=True))
            ]
            return codec.sequence_payload(type(values), items)
    return codec.to_payload(value, path)


def same_on_all() -> IteratorRemap:
    """Return the remap that gives every process the one state that all former ones had.

    Exact for Grain's ``ElasticIterator``, and for data that every process reads in full.
    HostStateError when the states differ.
    """

    def same(states: Sequence[Any], index: int, count: int) -> Any:
        del index, count
        return same_state(states)

    return IteratorRemap("same_on_all", same)


def smallest_position(
    *, global_batch_kept: bool = False, approximate: bool = False
) -> IteratorRemap:
    """Return the remap that continues at the lowest position of the former processes.

    Exact for data split as ``[process::count]`` after any shuffling: a sliced Grain ``MapDataset``,
    and a ``DataLoader`` with a ``SequentialSampler``, without worker processes. No element is left
    out; fewer elements (or batches) than there are processes are repeated.

    Args:
      global_batch_kept: the position counts batches, and each process's batch was changed so that
        the job's batch kept its size: the position stays. Otherwise it grows as processes get
        fewer.
      approximate: also for samplers that split the data in another way, such as ``IndexSampler``:
        the number of consumed elements is kept, but they are other elements; in the current epoch
        some are repeated and as many are left out.
    """
    move = partial(move_position, global_batch_kept=global_batch_kept, approximate=approximate)
    return IteratorRemap("smallest_position", move)
