"""What a restore makes of the words that the processes say of their prefetches."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.restore.prefetch import PrefetchWord, decide_prefetch

NONE = PrefetchWord()
READY = PrefetchWord("ready", 0)
UNFIT = PrefetchWord("unfit", 0, "step 7 was saved")
FAILED = PrefetchWord("failed", 0, "no room")


@pytest.mark.parametrize(
    ("words", "kind", "reason"),
    [
        ([READY, READY, READY], "use", ""),
        ([NONE, NONE], "restore", ""),
        ([], "restore", ""),
        ([READY, NONE, READY, NONE], "restore", "not by the processes [1, 3]"),
        ([READY, PrefetchWord("ready", 1)], "restore", "not the same one everywhere"),
        ([READY, UNFIT], "restore", "process 1: step 7 was saved"),
        ([NONE, UNFIT], "restore", "process 1: step 7 was saved"),
        ([FAILED, READY], "fail", "process 0: no room"),
        ([UNFIT, NONE, FAILED], "fail", "process 2: no room"),
        ([FAILED] * 9, "fail", "; ".join(f"process {p}: no room" for p in range(4))),
    ],
)
def test_one_decision_for_all(words: list[PrefetchWord], kind: str, reason: str) -> None:
    decision = decide_prefetch(dict(enumerate(words)))
    assert (decision.kind, decision.reason) == (kind, reason)
    reordered = dict(reversed(list(enumerate(words))))
    assert decide_prefetch(reordered) == decision
