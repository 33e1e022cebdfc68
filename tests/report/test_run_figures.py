"""Figures of made-up runs, by hand: steps lost, RPO, RTO, goodput."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
from run_log_support import failed_run, logged, restored_at, run_without_restores, saved

from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.tools.report.figures import (
    RunGoodput,
    RunRecovery,
    goodput_of,
    recoveries_of,
)
from emergency_ckpt.tools.report.lives import (
    lives_of,
    number,
    number_lives,
    run_events,
    text,
    whole,
)
from emergency_ckpt.tools.report.spans import marks_of, spans_of, thinned


def unnumbered(events: list[LoggedEvent]) -> list[LoggedEvent]:
    return [msgspec.structs.replace(event, life=0) for event in events]


def recoveries(events: list[LoggedEvent]) -> tuple[RunRecovery, ...]:
    return recoveries_of(lives_of(events), events)


def use(events: list[LoggedEvent]) -> RunGoodput:
    return goodput_of(lives_of(events), events)


def parts(found: RunGoodput) -> dict[str, float]:
    return dataclasses.asdict(found)


def test_recoveries_failed_run_give_figures() -> None:
    (found,) = recoveries(failed_run())
    assert found == RunRecovery(
        life=1,
        last_step=23,
        restored_step=20,
        tier="local",
        steps_lost=3,
        at_least=False,
        lost_s=3.0,
        recovery_s=1058.25 - 1033,
        restore_s=0.5,
    )


def test_recoveries_without_steps_give_lower_bounds() -> None:
    (found,) = recoveries(failed_run(every_step=False))
    assert (found.last_step, found.steps_lost, found.at_least) == (20, 0, True)
    assert found.lost_s == 0.0
    assert found.recovery_s == 1057.25 - 1030


def test_recoveries_injected_fault_counts_from_it() -> None:
    fault = msgspec.structs.replace(logged(1034, "fault.fired", step=23), process=None)
    (found,) = recoveries([*failed_run(), fault])
    assert found.recovery_s == 1058.25 - 1034


def test_recoveries_nothing_left_lose_all_steps() -> None:
    events = [event for event in failed_run() if event.name != "restore.finished"]
    events.append(logged(1057.25, "restore.nothing", 0, 1))
    (found,) = recoveries([event for event in events if event.life == 0 or event.process == 0])
    assert (found.steps_lost, found.restored_step, found.lost_s) == (23, None, 23.0)


def test_recoveries_life_without_a_restore_began_from_nothing() -> None:
    (found,) = recoveries(run_without_restores())
    assert (found.last_step, found.restored_step, found.tier) == (8, None, "")
    assert (found.steps_lost, found.lost_s, found.recovery_s) == (8, 8.0, 17.0)


def test_recoveries_restore_after_training_is_no_beginning() -> None:
    """Of Orbax's object, in one incarnation: for a look at an older step, say."""
    events = [*failed_run(), *(restored_at(1066.5, process, 10) for process in (0, 1))]
    assert recoveries(sorted(events, key=lambda event: event.time_s)) == recoveries(failed_run())


def test_recoveries_disagreeing_processes_are_unknown() -> None:
    events = [event for event in failed_run() if event.name != "restore.finished"]
    events += [restored_at(1057, 0, 20), restored_at(1057, 1, 15)]
    (found,) = recoveries(sorted(events, key=lambda event: event.time_s))
    assert (found.restored_step, found.steps_lost, found.lost_s) == (None, None, None)


def test_recoveries_life_that_never_trained_is_passed() -> None:
    crashed = [
        logged(1040, "start.link", 0, 1),
        logged(1041, "restore.stage", 0, 1, stage="started"),
    ]
    later = [msgspec.structs.replace(e, life=2) if e.life else e for e in failed_run()]
    first, second = recoveries(sorted([*crashed, *later], key=lambda e: e.time_s))
    assert (first.steps_lost, first.recovery_s) == (None, None)
    assert (second.steps_lost, second.lost_s, second.recovery_s) == (3, 3.0, 25.25)


def test_recoveries_rollback_over_two_lives_adds_both() -> None:
    events = failed_run()  # ends at step 30, 1067.25
    events += [
        logged(1080, "restore.stage", 0, 2, stage="started"),
        msgspec.structs.replace(restored_at(1081, 0, 10), life=2),
        logged(1082, "train.step", 0, 2, step=11),
    ]
    second = recoveries(events)[1]
    assert (second.steps_lost, second.lost_s) == (20, 10.0 + 13.0)


def test_goodput_failed_run_divides_all_time() -> None:
    found = use(failed_run())
    assert parts(found) == {
        "wall_s": 67.75,
        "start_s": 10.0,
        "training_s": 30.0,
        "stalled_s": 0.0,
        "redone_s": 3.0,
        "recovery_s": 24.25,
        "end_s": 0.5,
    }
    assert found.share == 30.0 / 67.75


def test_goodput_life_without_a_restore_counts() -> None:
    """The loops of Orbax's pages restore only where a step is there."""
    found = use(run_without_restores())
    assert parts(found) == {
        "wall_s": 42.5,
        "start_s": 10.0,
        "training_s": 7.0,
        "stalled_s": 0.0,
        "redone_s": 8.0,
        "recovery_s": 17.0,
        "end_s": 0.5,
    }


def test_goodput_restore_missing_in_the_log_redoes_nothing() -> None:
    """The log of the second life has lost its restore; its steps go on from those of the first."""
    events = run_without_restores(second_from=9)
    found = use(events)
    assert (found.training_s, found.redone_s) == (8.0 + 7.0, 0.0)
    (recovery,) = recoveries(events)
    assert (recovery.steps_lost, recovery.lost_s, recovery.recovery_s) == (None, None, 17.0)


def test_goodput_stalls_count_once_per_save() -> None:
    stalls = [
        logged(1015.1, "save.captured", process, step=5, tier="local", seconds=seconds)
        for process, seconds in ((0, 0.5), (1, 0.25))
    ]
    found = use([*failed_run(), *stalls])
    assert (found.stalled_s, found.training_s) == (0.5, 29.5)


@pytest.mark.parametrize("events", [[], [logged(5, "start.ready")]])
def test_goodput_run_without_training_is_zero(events: list[LoggedEvent]) -> None:
    assert use(events).share == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_goodput_cut_and_shuffled_log_adds_up(seed: int) -> None:
    chance = random.Random(seed)
    events = [event for event in failed_run() if chance.random() < 0.7]
    chance.shuffle(events)
    found = use(number_lives(unnumbered(events)))
    values = parts(found)
    wall_s = values.pop("wall_s")
    assert all(value >= 0 for value in values.values())
    assert sum(values.values()) == pytest.approx(wall_s)
    assert found == use(number_lives(unnumbered(sorted(events, key=lambda e: e.time_s))))


def test_run_events_load_of_orbaxs_object_ends_a_restore() -> None:
    """A load within a restore of the checkpointer does not, also where its process was lost."""
    loaded = {"stage": "loaded", "step": 20, "tier": "persistent", "seconds": 0.25}
    own = [logged(at_s, "restore.stage", stage=stage) for at_s, stage in ((1, "started"), (2, "x"))]
    start = logged(4, "start.link", life=1)
    loads = [logged(at_s, "restore.stage", life=at_s // 4, **loaded) for at_s in (3, 5)]
    found = run_events([*loads, start, *own])
    assert [event.name for event in found] == [
        *["restore.stage"] * 3,
        *["start.link", "restore.finished"],
    ]
    assert [life.restored_step for life in lives_of(found)] == [None, 20]
    assert [life.tier for life in lives_of(found)] == ["", "persistent"]


def test_number_lives_follows_restores_and_incarnations() -> None:
    events = failed_run()
    assert number_lives(unnumbered(events)) == events


def test_number_lives_without_incarnation_counts_restores() -> None:
    events = [msgspec.structs.replace(event, incarnation="") for event in failed_run()]
    assert number_lives(unnumbered(events)) == events


def test_number_lives_process_without_first_life_joins() -> None:
    events = [e for e in failed_run() if not (e.process == 1 and e.life == 0)]
    assert {e.life for e in number_lives(unnumbered(events)) if e.process == 1} == {1}


def test_number_lives_restart_before_a_restore_splits() -> None:
    events = [msgspec.structs.replace(event, incarnation="") for event in failed_run()]
    crashed = logged(1040, "warning", 0, 1, cause="setting")
    found = number_lives([*events, msgspec.structs.replace(crashed, incarnation="")])
    assert [e.life for e in found if e.name == "warning"] == [1]


def test_number_lives_that_only_trained_end_at_a_start() -> None:
    events = run_without_restores()
    assert number_lives(unnumbered(events)) == events
    nameless = [msgspec.structs.replace(event, incarnation="") for event in events]
    assert number_lives(unnumbered(nameless)) == nameless


def test_number_lives_job_events_follow_the_clock() -> None:
    job = [logged(at_s, "job.restarting") for at_s in (999, 1034, 1060)]
    job = [msgspec.structs.replace(event, process=None) for event in job]
    found = number_lives([*unnumbered(failed_run()), *job])
    assert [e.life for e in found if e.process is None] == [0, 0, 1]


def test_number_lives_demanded_save_stays_in_its_life() -> None:
    forced = [
        msgspec.structs.replace(event, incarnation="000000-ab.000001")
        for event in saved(1031, 0, 0, 21)
    ]
    found = number_lives(unnumbered([*failed_run(), *forced]))
    assert {e.life for e in found if e.time_s < 1040} == {0}


def test_spans_saves_and_restores_have_phases() -> None:
    spans = [span for span in spans_of(failed_run()) if span.process == 0]
    kinds = [(span.kind, span.begin_s, span.end_s) for span in spans]
    assert ("training", 1010, 1033) in kinds
    assert ("training", 1057.25, 1067.25) in kinds
    assert ("save to RAM", 1015, 1015.5) in kinds
    assert ("planning", 1054, 1055) in kinds
    assert ("handing over, waits", 1055, 1057.25) in kinds
    assert ("restore", 1054, 1057.25) in kinds


def test_spans_training_without_a_restore_begins_with_a_step() -> None:
    spans = [span for span in spans_of(run_without_restores()) if span.kind == "training"]
    assert [(span.begin_s, span.end_s) for span in spans] == [(1010, 1018), (1035, 1042)]


def test_spans_restore_amid_a_life_divides_its_training() -> None:
    """Orbax's object restores without a word at the beginning."""
    events = [event for event in run_without_restores() if event.life == 0]
    events.append(logged(1013.5, "restore.finished", step=1, tier="persistent", seconds=0.25))
    spans = [span for span in spans_of(events) if span.kind in ("training", "restore")]
    found = [(span.kind, span.begin_s, span.end_s, span.step) for span in spans]
    assert found == [
        ("training", 1010, 1013, 3),
        ("restore", 1013.25, 1013.5, 1),
        ("training", 1013.5, 1018, 8),
    ]


def test_spans_stall_ends_with_its_event() -> None:
    events = [logged(10.5, "save.captured", step=5, tier="local", seconds=0.25)]
    (span,) = spans_of(events)
    assert (span.kind, span.begin_s, span.end_s) == ("stall", 10.25, 10.5)


def test_spans_save_without_end_is_unfinished() -> None:
    events = [logged(10, "save.started", step=5, tier="persistent"), logged(12, "train.step")]
    (span,) = [span for span in spans_of(events) if span.kind == "save to storage"]
    assert (span.begin_s, span.end_s, span.unfinished) == (10, 12, True)


def test_spans_too_many_leave_short_ones_out() -> None:
    span = next(span for span in spans_of(failed_run()) if span.kind == "save to RAM")
    spans = [dataclasses.replace(span, end_s=span.begin_s + i) for i in range(3100)]
    kept, left_out = thinned(spans)
    assert (len(kept), left_out) == (1000, 2100)
    assert min(span.end_s - span.begin_s for span in kept) == 2100


def test_marks_failures_and_deaths_are_told() -> None:
    death = logged(5, "process.exited", process=3, returncode=-9)
    good = logged(6, "process.exited", process=3, returncode=0)
    failed = logged(4, "persistent.failed", step=25, reason="bucket is gone")
    silent = logged(3, "persistent.problem", cause="unreachable", reason="no route")
    waiting = logged(2, "persistent.problem", cause="waiting", text="no answer yet")
    events = [death, good, failed, silent, waiting]
    found = [(mark.name, mark.step, mark.label) for mark in marks_of(events)]
    assert found == [
        ("persistent.problem.unreachable", None, "reason no route"),
        ("persistent.failed", 25, "reason bucket is gone"),
        ("process.exited", None, "exit status -9"),
    ]


@pytest.mark.parametrize("value", [True, -1, 2**60, "7", None, 1e400, float("nan"), [1]])
def test_fields_of_wrong_kind_are_no_numbers(value: object) -> None:
    event = logged(1, "x", step=value, seconds=value)
    assert whole(event, "step") is None
    assert number(event, "seconds") is None


def test_text_of_field_is_bounded_and_printable() -> None:
    event = logged(1, "x", reason="a\x1b[31m\n" + "b" * 10_000, other=[["deep"]])
    assert len(text(event, "reason")) == 300
    assert text(event, "reason").isprintable()
    assert text(event, "other") == "[['deep']]"
