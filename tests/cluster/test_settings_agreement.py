"""The words in which settings that differ are told."""

from __future__ import annotations

from emergency_ckpt.cluster.membership import differing_settings


def test_many_holders_are_counted() -> None:
    tables = {p: {"n": "2" if p == 20 else "1"} for p in range(21)}
    (line,) = differing_settings(tables)
    assert "1 at processes 0, 1, 2, 3, 4, 5, 6, 7 and 12 more; 2 at process 20" in line


def test_setting_of_one_process_only_is_a_difference() -> None:
    (line,) = differing_settings({0: {"new": "1"}, 1: {}})
    assert line == "new differs between the processes: 1 at process 0; not known there at process 1"
