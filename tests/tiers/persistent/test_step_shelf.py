"""A shelf over storage that does not answer: every call ends at the tier's deadline."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from etils import epath

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.tiers.persistent.steps.removal import StepRecords
from emergency_ckpt.tiers.persistent.tier import PersistentTier

LONG_S = 60.0


@pytest.mark.parametrize(
    "call",
    [
        lambda shelf: shelf.record(3),
        lambda shelf: shelf.records(),
        lambda shelf: shelf.write_metrics(3, {"loss": 1}),
    ],
    ids=["record", "records", "write_metrics"],
)
def test_storage_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[StepRecords], object]
) -> None:
    tier = PersistentTier(str(tmp_path), timeout_s=1.0)
    for folder in ("3", "host_state/3"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("marker.json", "metrics.json"):
        (tmp_path / "host_state" / "3" / name).write_bytes(b"{}")
    answers = threading.Event()
    for name in ("open", "write_bytes"):
        monkeypatch.setattr(
            type(epath.Path(tmp_path)), name, lambda *_: answers.wait(LONG_S) and os.urandom(0)
        )
    with ThreadPoolExecutor(1) as pool:
        try:
            done = pool.submit(call, StepRecords(tier))
            with pytest.raises(PersistentTierError, match="no answer in time"):
                done.result(LONG_S / 2)
        finally:
            answers.set()
