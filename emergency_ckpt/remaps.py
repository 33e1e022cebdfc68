"""Ready values for ``host_state_remap``: what becomes of iterators in a job of another size.

They are chosen by hand, because nobody can see from a state how the data were cut. Each moves the
iterators wherever they are in the host state; all else must be alike on all processes. What cannot
be moved is a HostStateError that says why, and nothing is restored.

No remap can be right for iterators of ``tf.data``, whose state is closed to all but TensorFlow, nor
for Grain's ``IndexSampler``, which gives each process one stretch of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from emergency_ckpt.core.position_remap import move_position, same_state
from emergency_ckpt.state.host_state_remap import IteratorRemap

__all__ = ["same_on_all", "smallest_position"]


def same_on_all() -> IteratorRemap:
    """Every process takes the one state that all former ones had.

    Exact for Grain's ``ElasticIterator``, and for data that every process reads in full.
    HostStateError where the states differ.
    """

    def same(states: Sequence[Any], index: int, count: int) -> Any:
        del index, count
        return same_state(states)

    return IteratorRemap("same_on_all", same)


def smallest_position(
    *, global_batch_kept: bool = False, approximate: bool = False
) -> IteratorRemap:
    """Every process goes on where the former process that was least far had come to, all counted.

    Exact for data cut as ``[process::count]`` after any shuffling: a sliced Grain ``MapDataset``,
    and a ``DataLoader`` with a ``SequentialSampler``, without worker processes. No element is left
    out; fewer than there are processes, of elements or of batches, come again.

    Args:
      global_batch_kept: the position counts batches, and each process's batch was changed so that
        the job's stayed as large: the position stays. Else it grows as the processes get fewer.
      approximate: also for samplers that cut the data in another way, ``IndexSampler`` among them:
        as many elements are behind as before, but others: in the epoch under way some come twice,
        and as many not at all.
    """
    move = partial(move_position, global_batch_kept=global_batch_kept, approximate=approximate)
    return IteratorRemap("smallest_position", move)
