"""Positions of Grain's iterators, converted to another number of processes. Pure.

If the data are split as ``[process::count]``, ``count`` times the position elements have been
consumed. The same place for another count is rounded down: no element is left out, and fewer
elements than there are processes are repeated. If the processes' positions differ, the lowest one
is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

_SHARD = re.compile(r"(\(shard_index=)(\d{1,9})(, shard_count=)(\d{1,9})(, )")
_STRIDED = "SequentialSampler("


class Unmovable(ValueError):
    """The reason why a state cannot be converted to another number of processes."""


class _Loader(NamedTuple):
    """The state of a ``DataLoader``'s iterator; ``rounds``: elements read from its shard."""

    fields: dict[str, Any]
    rounds: int


def move_position(
    states: Sequence[Any],
    index: int,
    count: int,
    *,
    global_batch_kept: bool = False,
    approximate: bool = False,
) -> Any:
    """Return the state of process ``index`` of ``count`` from those of all former processes in
    order.

    Args:
      global_batch_kept: positions count batches, and the global batch is as large as before: the
        position then stays as it is.
      approximate: convert also where a sampler splits the data in another way than
        ``[process::count]``.

    Raises:
      Unmovable: the kind of state is not known, or its shards are not those of the processes.
    """
    former = len(states)
    if all(isinstance(state, bytes | str) for state in states):
        loaders = [_loader(state, owner, former) for owner, state in enumerate(states)]
        sampler = str(loaders[0].fields["sampler"])
        if not sampler.startswith(_STRIDED) and not approximate:
            kind = sampler.split("(", maxsplit=1)[0]
            raise Unmovable(
                f"{kind} cuts the data into one contiguous part per process: no position for"
                " another number of processes has consumed the same elements"
            )
        rounds = min(loader.rounds for loader in loaders) * former // count
        moved = _moved_loader(loaders[0].fields, rounds, index, count)
        return moved.encode() if isinstance(states[0], bytes) else moved
    positions = [_next_index(state) for state in states]
    if global_batch_kept:
        return {"next_index": min(positions)}
    return {"next_index": min(positions) * former // count}


def same_state(states: Sequence[Any]) -> Any:
    """Return the state that all processes have. Raises Unmovable when they differ."""
    if any(state != states[0] for state in states):
        raise Unmovable("the states of the processes differ")
    return states[0]


def _next_index(state: Any) -> int:
    fields = cast("Mapping[str, Any]", state) if isinstance(state, Mapping) else {}
    position = fields.get("next_index")
    if set(fields) != {"next_index"} or not isinstance(position, int) or position < 0:
        raise Unmovable(
            f"{str(state)[:200]} is not the position of a Grain dataset that is read in order by"
            " one process"
        )
    return position


def _loader(state: bytes | str, owner: int, former: int) -> _Loader:
    try:
        fields = json.loads(state)
        seen = fields["last_seen_indices"]
        found = _SHARD.search(fields["sampler"])
        plain = fields["version"] == 2 and fields["worker_count"] == 0 and set(seen) == {"0"}
        last = seen["0"]
    except (ValueError, TypeError, KeyError) as error:
        raise Unmovable(f"this is not the state of a Grain DataLoader: {error!r:.200}") from error
    if not plain or found is None or not isinstance(last, int):
        raise Unmovable(
            "each worker process of a DataLoader has its own position, and a DataLoader without"
            " shard_options has no shards"
        )
    if (int(found[2]), int(found[4])) != (owner, former):
        raise Unmovable(
            f"its shard is {found[2]} of {found[4]}, not that of process {owner} of {former}"
        )
    return _Loader(fields, max(0, (last - owner) // former + 1))


def _moved_loader(fields: Mapping[str, Any], rounds: int, index: int, count: int) -> str:
    moved = {
        **fields,
        "last_seen_indices": {"0": index + (rounds - 1) * count},
        "sampler": _SHARD.sub(rf"\g<1>{index}\g<3>{count}\g<5>", fields["sampler"], count=1),
    }
    return json.dumps(moved, indent=4)
