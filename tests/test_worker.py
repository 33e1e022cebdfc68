"""The background thread, and the record of what failed in it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from emergency_ckpt.background import BackgroundWorker, Failures, copy_threads
from emergency_ckpt.errors import LocalTierError, SaveFailed

LONG_S = 60.0


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
def worker(failures: Failures) -> Iterator[BackgroundWorker]:
    worker = BackgroundWorker("test-worker", failures)
    yield worker
    assert worker.stop(LONG_S)


def test_failures_are_counted_and_the_newest_is_raised_once() -> None:
    failures = Failures()
    failures.raise_pending()
    errors = [LocalTierError("save", f"step {n}", "full") for n in range(3)]
    for error in errors:
        failures.record(error)
    with pytest.raises(LocalTierError) as caught:
        failures.raise_pending()
    assert caught.value is errors[-1]
    failures.raise_pending()
    assert failures.count == 3
    failures.record(errors[0])
    with pytest.raises(LocalTierError) as caught:
        failures.raise_pending()
    assert caught.value is errors[0]
    assert failures.count == 4


def _raised(error: LocalTierError, cause: BaseException) -> LocalTierError:
    with pytest.raises(LocalTierError):
        raise error from cause
    return error


def test_record_cyclic_causes_end_and_lose_their_frames() -> None:
    """In a process of its own it would hang for ever; the thread here is a daemon."""
    alone = LocalTierError("save", "step 1", "full")
    first, second = LocalTierError("save", "a", "full"), LocalTierError("save", "b", "full")
    _raised(alone, alone)
    _raised(first, _raised(second, first))
    failures = Failures()
    errors = (alone, first)
    record = threading.Thread(target=lambda: [*map(failures.record, errors)], daemon=True)
    record.start()
    record.join(LONG_S / 6)
    assert not record.is_alive()
    assert failures.count == 2
    assert [error.__traceback__ for error in (alone, first, second)] == [None] * 3


def test_record_error_with_cause_and_context_clears_both() -> None:
    cause, context = (LocalTierError("save", name, "full") for name in ("cause", "context"))
    for error in (cause, context):
        _raised(error, ValueError("below"))
    failed = LocalTierError("save", "step 1", "full")
    failed.__cause__, failed.__context__ = cause, context
    Failures().record(failed)
    assert cause.__traceback__ is None
    assert context.__traceback__ is None


def test_work_runs_in_order_of_submission_in_one_other_thread(
    worker: BackgroundWorker,
) -> None:
    seen: list[tuple[int, int]] = []
    for number in range(20):
        assert worker.wait_idle(LONG_S)
        worker.submit(lambda number=number: seen.append((number, threading.get_ident())))
    assert worker.wait_idle(LONG_S)
    assert [number for number, _ in seen] == list(range(20))
    threads = {thread for _, thread in seen}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_there_is_room_for_one_piece_of_work(worker: BackgroundWorker) -> None:
    release = threading.Event()
    worker.submit(lambda: release.wait(LONG_S) and None)
    assert not worker.wait_idle(0.01)
    with pytest.raises(RuntimeError, match="test-worker is busy"):
        worker.submit(lambda: None)
    release.set()
    assert worker.wait_idle(LONG_S)


def test_what_is_asked_for_meanwhile_is_done_once_after_it() -> None:
    seen: list[str] = []
    begun, release = threading.Event(), threading.Event()
    worker = BackgroundWorker("eckpt-test-next", Failures())

    def first() -> None:
        begun.set()
        release.wait(LONG_S)
        seen.append("first")

    worker.submit_next(first)
    assert begun.wait(LONG_S)
    for _ in range(3):
        worker.submit_next(lambda: seen.append("next"))
    assert not worker.wait_idle(0)
    release.set()
    assert worker.wait_idle(LONG_S)
    assert seen == ["first", "next"]
    worker.stop(LONG_S)
    with pytest.raises(RuntimeError, match="stopped"):
        worker.submit_next(first)


def test_submit_after_runs_each_before_the_thread_is_idle(worker: BackgroundWorker) -> None:
    seen: list[str] = []
    release = threading.Event()
    worker.submit_after(lambda: release.wait(LONG_S) and None)
    worker.submit_next(lambda: seen.append("next"))
    for name in ("a", "b"):
        worker.submit_after(lambda name=name: seen.append(name))
    assert not worker.wait_idle(0)
    release.set()
    assert worker.wait_idle(LONG_S)
    assert seen == ["a", "b", "next"]


def test_work_that_raises_is_recorded_and_the_next_work_runs(
    worker: BackgroundWorker, failures: Failures
) -> None:
    def broken() -> None:
        raise KeyError("no such thing")

    done = threading.Event()
    worker.submit(broken)
    assert worker.wait_idle(LONG_S)
    worker.submit(done.set)
    assert done.wait(LONG_S)
    with pytest.raises(SaveFailed, match="unexpected KeyError: 'no such thing'") as caught:
        failures.raise_pending()
    assert isinstance(caught.value.__cause__, KeyError)


def test_work_that_exits_is_recorded_and_the_next_work_runs(
    worker: BackgroundWorker, failures: Failures
) -> None:
    """As a user's policy of what storage keeps may do, which a save asks at its end."""
    done = threading.Event()
    worker.submit(lambda: sys.exit("of a policy"))
    assert worker.wait_idle(LONG_S)
    worker.submit(done.set)
    assert done.wait(LONG_S)
    with pytest.raises(SaveFailed, match="unexpected SystemExit: of a policy"):
        failures.raise_pending()


def test_what_the_work_held_is_gone_once_the_worker_is_idle(worker: BackgroundWorker) -> None:
    gone = threading.Event()

    class Snapshot:
        def __del__(self) -> None:
            gone.set()

    snapshot = Snapshot()
    worker.submit(lambda snapshot=snapshot: None)
    del snapshot
    assert worker.wait_idle(LONG_S)
    assert gone.is_set()


def test_failures_do_not_keep_the_snapshot(failures: Failures) -> None:
    gone = threading.Event()

    class Snapshot:
        def __del__(self) -> None:
            gone.set()

    def copy(snapshot: Snapshot) -> None:
        raise OSError(f"no room for {type(snapshot).__name__}")

    def save() -> None:
        try:
            copy(Snapshot())
        except OSError as error:
            failure = SaveFailed("save", "step 1", str(error))
            failure.__cause__ = error
            failures.record(failure)

    save()
    assert gone.is_set()
    with pytest.raises(SaveFailed, match="no room for Snapshot"):
        failures.raise_pending()


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_and_its_threads_run_below_the_training_thread(
    failures: Failures,
) -> None:
    before, found = _niceness(), list[int]()
    worker = BackgroundWorker("nice", failures, niceness=3)

    def work() -> None:
        found.append(_niceness())
        thread = threading.Thread(target=lambda: found.append(_niceness()))
        thread.start()
        thread.join()

    worker.submit(work)
    assert worker.wait_idle(LONG_S)
    assert worker.stop(LONG_S)
    assert found == [min(before + 3, 19)] * 2
    assert _niceness() == before


def test_priority_has_a_floor(failures: Failures) -> None:
    found = list[int]()
    worker = BackgroundWorker("nice", failures, niceness=500)
    worker.submit(lambda: found.append(_niceness()))
    assert worker.stop(LONG_S)
    assert found == [19]
    failures.raise_pending()


def test_work_is_done_also_where_its_priority_cannot_be_lowered(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr(os, "setpriority", forbidden)
    done = threading.Event()
    worker = BackgroundWorker("nice", failures, niceness=3)
    worker.submit(done.set)
    assert worker.stop(LONG_S)
    assert done.is_set()
    failures.raise_pending()


def test_stop_lets_the_work_end_and_takes_no_more(failures: Failures) -> None:
    worker = BackgroundWorker("stopping", failures)
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(LONG_S)
        ended.set()

    worker.submit(work)
    assert started.wait(LONG_S)
    assert not worker.stop(0.01)
    with pytest.raises(RuntimeError, match="stopp"):
        worker.submit(lambda: None)
    release.set()
    assert worker.stop(LONG_S)
    assert ended.is_set()
    with pytest.raises(RuntimeError, match="stopp"):  # nor when nothing is under way
        worker.submit(lambda: None)
    assert worker.stop(LONG_S)


def test_copies_use_two_threads_or_more_but_one_on_one_core() -> None:
    cores = os.sched_getaffinity(0)
    assert min(2, len(cores)) <= copy_threads() <= len(cores)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert copy_threads() == 1
    finally:
        os.sched_setaffinity(0, cores)
