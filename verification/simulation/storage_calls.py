"""The calls of the coordination service in one save to storage: `storage_calls.py WRITERS...`.

Every process is a writer, and runs the product's own save; what is written is left out.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import install
import sim
from scheduler import Process
from service import Client, Service

LIFE = f"{1:012d}-{'0' * 16}"
TIMEOUT_S = 600.0


class NoStorage:
    """A tier that stores nothing; its writers meet as those of Orbax's step do."""

    def create(self) -> None:
        pass

    def write_document(self, *args: Any) -> None:
        pass

    def write_tensors(
        self, save: Any, tree: Any, shards: Any, writers: Any, meet: Any, attempt: str, *_: Any
    ) -> None:
        meet("tensors_begun")
        meet("tensors_written")
        assert attempt, "the first writer's name of the attempt"

    def finish(self, *args: Any, **how: Any) -> None:
        pass


class NoChain:
    """The record of storage's lives, of a directory without steps."""

    writer = SimpleNamespace(table=None, has_seen=False, check=lambda: None)
    timelines = SimpleNamespace(bind=lambda: None, note_stored=lambda _: None)

    def begin(self, save: Any) -> None:
        pass

    make_room = publish = begin


def count(writers: int) -> dict[str, int]:
    """Return the calls, and the keys that were kept at once and in the end, of two saves."""
    install.product()
    from emergency_ckpt.background import Failures  # noqa: PLC0415
    from emergency_ckpt.cluster.coordination import JaxCoordinator  # noqa: PLC0415
    from emergency_ckpt.cluster.shard_source import HostStateInbox  # noqa: PLC0415
    from emergency_ckpt.core.placement import Topology  # noqa: PLC0415
    from emergency_ckpt.core.stall import TimeLimits  # noqa: PLC0415
    from emergency_ckpt.events import EventSink  # noqa: PLC0415
    from emergency_ckpt.save.persistent.save import PersistentSave, PersistentSaves  # noqa: PLC0415
    from emergency_ckpt.state import host_state  # noqa: PLC0415
    from emergency_ckpt.state.tree import describe  # noqa: PLC0415
    from emergency_ckpt.types import SaveId  # noqa: PLC0415

    # A greenlet that another one starts begins at the depth of that one: along a chain of thousands
    # of starts the depths add up, while no stack is deep.
    sys.setrecursionlimit(100 * writers + 10_000)
    scheduler = sim.begin(1)
    service, tree = Service(), describe({"x": 1}, "save")
    service.delay = lambda: 0.0002
    topology, everyone = Topology(writers, (0,) * writers), tuple(range(writers))
    whole: list[bool] = []
    calls: list[int] = []

    def saves_of(index: int) -> Any:
        coordinator = JaxCoordinator(Client(service), "job", index, writers)
        tier: Any = NoStorage()
        chain: Any = NoChain()
        peers: Any = None
        quiet = EventSink(None, process_index=index)
        return PersistentSaves(
            tier,
            coordinator,
            peers,
            HostStateInbox(),
            quiet,
            Failures(),
            chain=chain,
            limits=TimeLimits(60.0, TIMEOUT_S),
        )

    every = [saves_of(index) for index in everyone]
    processes = [Process(f"p{index}", index, None) for index in everyone]
    for step in (1, 2):

        def run(index: int, step: int = step) -> None:
            save = SaveId(step, LIFE, "run")
            payload = host_state.capture("x")
            job = PersistentSave(save, tree, dict, payload, topology, everyone)
            whole.append(every[index].run(job))

        for index, process in enumerate(processes):
            scheduler.spawn(process, "save", lambda index=index: run(index))
        ended = step * writers
        scheduler.run(lambda ended=ended: len(whole) == ended, 3600.0, 1 << 40)
        calls.append(service.calls - sum(calls))
    assert all(whole), "a save failed"
    assert len(whole) == 2 * writers
    return {
        "writers": writers,
        "calls": calls[1],
        "most_keys": service.most_keys,
        "keys": len(service.values),
    }


if __name__ == "__main__":
    for number in sys.argv[1:]:
        print(json.dumps(count(int(number))), flush=True)
