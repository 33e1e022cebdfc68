"""The explanation of the last restore, from events as processes write them, whole and cut short."""

from __future__ import annotations

from collections.abc import Iterable

from run_log_support import RestoreExplanation, last_restore

from emergency_ckpt.extras.event_log import LoggedEvent


def event(
    time_s: float, name: str, process: int = 0, incarnation: str = "b", **fields: object
) -> LoggedEvent:
    return LoggedEvent(
        time_s=time_s,
        name=name,
        process=process,
        slice=process,
        run_id="run7",
        incarnation=incarnation,
        fields=fields,
    )


def one(
    process: int, begin_s: float, *, peer: int = 0, incarnation: str = "b"
) -> list[LoggedEvent]:
    """A restore of step 40 by one process: plan 1 s, fetch 2 s, settle 0.5 s."""

    def at(after_s: float, name: str, **fields: object) -> LoggedEvent:
        return event(begin_s + after_s, name, process, incarnation, **fields)

    received = [
        at(3, "restore.stage", stage="received", step=40, holder="process/0", size_bytes=peer)
    ]
    return [
        at(0, "restore.stage", stage="started", requested_step=None),
        at(1, "restore.stage", stage="planned", step=40, tier="local", rejected=1),
        at(1, "restore.rejected", step=41, tier="local", reason="held nowhere: w[0:4]"),
        at(3, "restore.stage", stage="fetched", step=40, bytes_local=100 - peer, bytes_peer=peer),
        *(received if peer else []),
        at(
            3.5,
            "restore.finished",
            step=40,
            tier="local",
            seconds=3.5,
            bytes_local=100 - peer,
            bytes_peer=peer,
            bytes_persistent=0,
        ),
    ]


def story_of(*events: Iterable[LoggedEvent]) -> RestoreExplanation:
    found = last_restore(sorted((e for each in events for e in each), key=lambda e: e.time_s))
    assert found is not None
    return found


def test_story_of_two_processes_names_sources_and_times() -> None:
    explanation = story_of(one(0, 10), one(1, 10.5, peer=60))
    assert (explanation.outcome, explanation.step, explanation.tier) == ("finished", 40, "local")
    assert (explanation.started_s, explanation.seconds) == (10, 4)
    assert [(p.step, p.tier, p.reason) for p in explanation.passed_over] == [
        (41, "local", "held nowhere: w[0:4]")
    ]
    first, second = explanation.processes
    assert first.received == {}
    assert second.received == {"process/0": 60}
    assert (second.bytes_local, second.bytes_peer, second.after_s) == (40, 60, 0.5)
    assert second.phases == {"plan": 1, "load": 0, "fetch": 2, "settle": 0.5}


def test_story_tells_last_of_several_restores() -> None:
    older = [*one(0, 10, incarnation="a"), *one(1, 10, incarnation="a")]
    explanation = story_of(older, one(0, 100), [event(104, "save.started", step=41)], one(0, 200))
    assert explanation.started_s == 200
    assert [each.process for each in explanation.processes] == [0]


def test_story_of_killed_process_is_unfinished() -> None:
    explanation = story_of(one(0, 10), one(1, 10)[:2])
    assert explanation.outcome == "unfinished"
    assert [each.outcome for each in explanation.processes] == ["finished", "unfinished"]
    assert explanation.processes[1].last_event == "restore.stage.planned"


def test_story_unfinished_goes_on_after_a_warning_of_the_restore() -> None:
    started, planned, *_ = one(0, 10)
    warning = event(12, "warning", cause="restore_without_host_state", step=40)
    fetched = event(13, "restore.stage", stage="fetched", step=40, bytes_local=7, bytes_peer=0)
    (process,) = story_of([started, planned, warning, fetched]).processes
    assert (process.outcome, process.bytes_local) == ("unfinished", 7)


def test_story_keeps_remarks_in_order() -> None:
    events = one(0, 10)
    events[3:3] = [
        event(11.5, "restore.quarantined", step=41, holder="process/1", shard=3, detail="CRC"),
        event(11.75, "persistent.problem", cause="unreachable", reason="no route"),
        event(11.875, "persistent.problem", cause="waiting", text="no answer yet"),
        event(12, "restore.stage", stage="replanned", attempt=1, reason="a copy failed"),
    ]
    remarks = story_of(events).remarks
    assert [(each.after_s, each.name) for each in remarks] == [
        (1.5, "restore.quarantined"),
        (1.75, "persistent.problem.unreachable"),
        (2, "restore.stage.replanned"),
    ]
    assert remarks[0].text == "step 41, holder process/1, shard 3, detail CRC"


def test_story_of_foreign_fields_is_told_without_them() -> None:
    events = [
        event(10, "restore.stage", stage="started", requested_step="x"),
        event(11, "restore.rejected", step=[], tier={}, reason=None),
        event(11, "restore.stage", stage="received", holder={}, size_bytes="many"),
        event(12, "restore.finished", step=True, tier=7, bytes_local="x"),
    ]
    explanation = story_of(events)
    assert (explanation.step, explanation.requested_step) == (None, None)
    assert explanation.processes[0].bytes_local == 0
