"""A restore decides from all processes' reports whether a prefetch is used."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.restore.prefetch import PrefetchReport, decide_prefetch

NONE = PrefetchReport()
READY = PrefetchReport("ready", 0)
UNFIT = PrefetchReport("unfit", 0, "step 7 was saved")
FAILED = PrefetchReport("failed", 0, "no room")


@pytest.mark.parametrize(
    ("reports", "kind", "reason"),
    [
        ([READY, READY, READY], "use", ""),
        ([NONE, NONE], "restore", ""),
        ([], "restore", ""),
        ([READY, NONE, READY, NONE], "restore", "not by the processes [1, 3]"),
        ([READY, PrefetchReport("ready", 1)], "restore", "not the same on all processes"),
        ([READY, UNFIT], "restore", "process 1: step 7 was saved"),
        ([NONE, UNFIT], "restore", "process 1: step 7 was saved"),
        ([FAILED, READY], "fail", "process 0: no room"),
        ([UNFIT, NONE, FAILED], "fail", "process 2: no room"),
        ([FAILED] * 9, "fail", "; ".join(f"process {p}: no room" for p in range(4))),
    ],
)
def test_decide_prefetch_gives_one_decision_for_all(
    reports: list[PrefetchReport], kind: str, reason: str
) -> None:
    decision = decide_prefetch(dict(enumerate(reports)))
    assert (decision.kind, decision.reason) == (kind, reason)
    reordered = dict(reversed(list(enumerate(reports))))
    assert decide_prefetch(reordered) == decision
