"""Ready values for ``host_state_remap``: conversions of iterators to a job of another size.

The user chooses one, because a state does not tell how the data were split. Each converts the
iterators anywhere in the host state; all other values must be equal on all processes. A state that
cannot be converted is a HostStateError with the reason, and nothing is restored.

No conversion is possible for iterators of ``tf.data``, whose state only TensorFlow can read, nor
for Grain's ``IndexSampler``, which gives each process one contiguous part of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from emergency_ckpt.core.position_remap import move_position, same_state
from emergency_ckpt.state.host_state_remap import IteratorRemap

__all__ = ["same_on_all", "smallest_position"]


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
