"""What a process says when its part of a plan cannot be had."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from emergency_ckpt.core.restore.plan_types import FetchGroup, ProcessPlan
from emergency_ckpt.events import EventSink
from emergency_ckpt.restore.shards.holder_calls import HolderCalls
from emergency_ckpt.restore.shards.shard_fetch import CopiesFailed
from emergency_ckpt.restore.shards.shard_loader import ShardCollection
from emergency_ckpt.testing.memory_holdings import MemoryHoldings
from emergency_ckpt.tiers.local.tier import LocalTier
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.types import SaveId, Writer

SECRET = b"s" * 40
SAVE = SaveId(5, "019b-life", "run")


def _use_until_given_up(shards: ShardCollection, plan: ProcessPlan) -> None:
    with shards.collecting(plan) as arrivals:
        for arrived in arrivals:
            while True:  # until the slot is given up under one's hands
                shards.bytes_of(arrived[0])


def test_failed_copy_is_named_also_by_users_of_what_had_come(tmp_path: Path) -> None:
    """Else the leader takes it for a fault that no other plan can mend."""
    holdings = MemoryHoldings()
    digest = holdings.add(SAVE, [bytes([number]) * 4096 for number in range(8)])
    holdings.corrupt(digest, 7)
    writer = Writer(process_index=0, process_count=1, slice_index=0, hostname="h")
    tier = LocalTier.open(tmp_path, "run", writer, host_state_limit_bytes=1 << 20, copy_threads=1)
    server = TransferServer(holdings, run_id="run", secret=SECRET)
    server.start()
    try:
        with TransferClient(run_id="run", secret=SECRET) as client:
            sink = EventSink(None, process_index=0)
            shards = ShardCollection(
                tier,
                client,
                sink,
                save=SAVE,
                me="process/0",
                retained=None,
                calls=HolderCalls(sink, time.monotonic() + 30),
            )
            group = FetchGroup(digest, None, ("server",))
            plan = ProcessPlan(fetch=(group,), addresses={"server": server.address})
            with pytest.raises(CopiesFailed) as failed:
                _use_until_given_up(shards, plan)
            assert [(copy.holder, copy.shard) for copy in failed.value.unusable] == [("server", 7)]
    finally:
        server.stop()
        tier.close()
