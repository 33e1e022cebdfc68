"""Which calls to storage are repeated, and until when."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorstore

from emergency_ckpt.errors import DeadlineExceeded
from emergency_ckpt.storage.calls import (
    StorageTimeout,
    call,
    call_with_retries,
    is_passing,
    is_unreachable,
)
from emergency_ckpt.work_progress import WorkProgress


class HttpError(Exception):
    """As gcsfs and google-cloud-storage raise it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


PASSING = [
    HttpError(429),
    HttpError(503),
    ConnectionResetError("reset by peer"),
    TimeoutError("read timed out"),
    ValueError("UNAVAILABLE: try again"),
    KeyError("items"),
    OSError(errno.EIO, "a cable was pulled"),
    OSError(errno.ESTALE, "the file server was restarted"),
    OSError(errno.EMFILE, "other threads have files open"),
    ValueError("RESOURCE_EXHAUSTED: Quota exceeded, try again later"),
    ValueError("UNAVAILABLE: Error reading local file: [os_error_code='5']"),
]
FINAL = [
    HttpError(403),
    HttpError(404),
    FileNotFoundError("gone"),
    OSError("Forbidden: bucket/name"),
    ValueError("NOT_FOUND: no such object"),
    ValueError("Error opening driver: PERMISSION_DENIED: no"),
    TypeError("unsupported operand"),
    AttributeError("no attribute"),
    NameError("name is not defined"),
    AssertionError("cannot be"),
    *(
        OSError(number, os.strerror(number))
        for number in (
            errno.EROFS,
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EACCES,
            errno.EPERM,
            errno.ENOTDIR,
            errno.ENAMETOOLONG,
            errno.ELOOP,
            errno.EFBIG,
        )
    ),
    ValueError(
        "RESOURCE_EXHAUSTED: Error writing local file: No space left on device [os_error_code='28']"
    ),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_passing_error_is_tried_again(error: Exception) -> None:
    assert is_passing(error)
    answers: list[object] = [error, error, "stored"]
    assert (
        call_with_retries("bucket", lambda: answer(answers), deadline_s=in_seconds(60)) == "stored"
    )
    assert answers == []


@pytest.mark.parametrize("error", FINAL, ids=repr)
def test_any_other_is_raised_at_once(error: Exception) -> None:
    assert not is_passing(error)
    answers: list[object] = [error, "never asked for"]
    with pytest.raises(type(error)) as raised:
        call_with_retries("bucket", lambda: answer(answers), deadline_s=in_seconds(60))
    assert raised.value is error
    assert answers == ["never asked for"]


def test_undecodable_bytes_are_not_asked_for_again(tmp_path: Path) -> None:
    """Of every error that TensorStore has for a flipped byte of a database."""
    base = {"driver": "file", "path": f"{tmp_path}/"}
    kvstore = {"driver": "ocdbt", "base": base}
    spec = {"driver": "zarr", "kvstore": {**kvstore, "path": "w/"}}
    made = tensorstore.open(
        spec, create=True, dtype=tensorstore.int32, shape=[64, 64], open=True
    ).result()
    made.write(np.random.default_rng(0).integers(0, 5, (64, 64), np.int32)).result()
    errors: dict[str, ValueError] = {}
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        sound = path.read_bytes()
        for at in range(0, len(sound), max(1, len(sound) // 40)):
            path.write_bytes(bytes([*sound[:at], sound[at] ^ 0xFF, *sound[at + 1 :]]))
            try:
                tensorstore.open(spec, open=True).result().read().result()
            except ValueError as error:
                errors[str(error)] = error
        path.write_bytes(sound)
    assert len(errors) > 3
    for error in errors.values():
        assert not is_passing(error), error
        assert not is_unreachable(error)


def test_stalled_call_is_begun_again_and_late_outcome_dropped() -> None:
    ended, begun = threading.Event(), list[int]()

    def read() -> str:
        begun.append(len(begun))
        if len(begun) == 1:
            ended.wait(60)
            raise ConnectionResetError("late, and seen by nobody")
        return f"time {len(begun)}"

    assert (
        call("bucket", read, progress=WorkProgress.until(in_seconds(60)), again_after_s=0.1)
        == "time 2"
    )
    ended.set()
    assert begun == [0, 1]


def test_second_time_that_stalls_too_leaves_the_first_outcome() -> None:
    second, ended = threading.Event(), threading.Event()

    def read() -> str:
        if threading.current_thread() is not threads[0]:
            second.set()
            ended.wait(60)
        assert second.wait(60)
        return "first"

    threads: list[threading.Thread] = []

    def first_known() -> str:
        threads.append(threading.current_thread())
        return read()

    assert (
        call("bucket", first_known, progress=WorkProgress.until(in_seconds(60)), again_after_s=0.1)
        == "first"
    )
    ended.set()


def test_call_that_stalls_twice_ends_at_the_deadline() -> None:
    ended = threading.Event()
    with pytest.raises(StorageTimeout):
        call(
            "bucket",
            lambda: ended.wait(60),
            progress=WorkProgress.until(in_seconds(1)),
            again_after_s=0.1,
        )
    ended.set()


def test_at_the_deadline_the_last_error_is_raised() -> None:
    asked: list[int] = []

    def refuse() -> None:
        asked.append(len(asked))
        raise ConnectionResetError(f"time {len(asked)}")

    with pytest.raises(ConnectionResetError) as raised:
        call_with_retries("bucket", refuse, deadline_s=in_seconds(5))
    assert str(raised.value) == f"time {len(asked)}"
    assert len(asked) > 1


def test_silent_call_ends_at_the_deadline() -> None:
    answers = threading.Event()
    try:
        with pytest.raises(DeadlineExceeded, match="bucket") as raised:
            call("bucket", lambda: answers.wait(60), progress=WorkProgress.until(in_seconds(0.05)))
    finally:
        answers.set()
    assert isinstance(raised.value, StorageTimeout)
    raised.value.thread.join(60)  # later tests count threads


def answer(answers: list[object]) -> object:
    """The next of them, raised if it is an error."""
    given = answers.pop(0)
    if isinstance(given, Exception):
        raise given
    return given


def in_seconds(seconds: float) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize(
    ("error", "says_nothing"),
    [
        (ConnectionResetError("reset"), True),
        (TimeoutError("late"), True),
        (ValueError("UNAVAILABLE: try again"), True),
        (PermissionError("denied"), True),
        (DeadlineExceeded("use storage at", "dir", "no answer in time"), True),
        (RuntimeError("can't start new thread"), True),
        (MemoryError("Unable to allocate 1. GiB"), True),
        (FileNotFoundError("absent"), False),
        (ValueError("NOT_FOUND: no such key"), False),
        (ValueError("DATA_LOSS: bad chunk"), False),
        (KeyError("shape"), False),
    ],
)
def test_only_silence_and_refusal_say_nothing_of_a_step(
    error: Exception, says_nothing: bool
) -> None:
    assert is_unreachable(error) == says_nothing
