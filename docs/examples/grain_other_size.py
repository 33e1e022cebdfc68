"""Recipe: Grain's iterators in a job of another number of processes. For ``host_state_remap``.

A remap is called on every process with the host states of all former processes in order, this
process's index and the count. It returns this process's host state. Here the host state is
``{"data": iterator, ...}``; what stands beside the iterator is taken from former process 0.
"""

from __future__ import annotations

from typing import Any


def elastic(states: list[Any], index: int, count: int) -> Any:
    """Go on exactly, where all processes had one state, as with Grain's ``ElasticIterator``."""
    if any(state["data"] != states[0]["data"] for state in states):
        raise ValueError("the iterators of the former processes differ")
    return states[0]


def sliced(states: list[Any], index: int, count: int) -> Any:
    """Go on where the slowest process was, for data cut as ``dataset[process::count]``.

    No element is left out; those that faster processes had read come again. Positions count
    elements. If positions count batches, and the job's batch stays as large, return the position
    unchanged.
    """
    if any(set(state["data"]) != {"next_index"} for state in states):
        raise ValueError("this is no position of a Grain dataset that one process reads in order")
    read = min(state["data"]["next_index"] for state in states) * len(states)
    return {**states[0], "data": {"next_index": read // count}}
