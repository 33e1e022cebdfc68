"""Mappings and views of the native engine: bounds, lifetime, who keeps what alive."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from native_parts import AMPLE_S, SIZE_BYTES, Ends, make_mapping

from emergency_ckpt import _native


def test_mapping_reports_what_it_is() -> None:
    mapping = make_mapping(100, writable=False)
    assert (mapping.size_bytes, mapping.writable) == (100, False)


def test_mapping_of_a_shorter_file_is_refused() -> None:
    fd = os.memfd_create("eckpt_test")
    try:
        os.ftruncate(fd, 99)
        with pytest.raises(ValueError, match="expected 100 bytes, got 99"):
            _native.Mapping(fd, 100, writable=True)
    finally:
        os.close(fd)


def test_mapping_faults_of_the_system_are_os_errors(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.Mapping(-1, 1, writable=True)
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    with path.open("rb") as file, pytest.raises(PermissionError):
        _native.Mapping(file.fileno(), 10, writable=True)


def test_view_is_read_only_and_shows_the_mapped_bytes(mapping: _native.Mapping) -> None:
    _native.copy_crc32c(mapping, [(b"hello", 77)], 1)
    view = mapping.view(77, 5, None)
    assert (view.dtype, view.shape, view.flags.writeable) == (np.uint8, (5,), False)
    assert view.tobytes() == b"hello"
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    _native.copy_crc32c(mapping, [(b"J", 77)], 1)
    assert view.tobytes() == b"Jello"  # no copy


class Owner:
    pass


@pytest.mark.dear
def test_view_and_what_is_made_from_it_keep_the_owner(mapping: _native.Mapping) -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    view = mapping.view(0, 100, owner)
    derived = view[10:20].view(np.int8).reshape(2, 5)
    del owner, view
    gc.collect()
    assert gone() is not None
    del derived
    gc.collect()
    assert gone() is None


def test_view_outlives_close_and_the_mapping_object() -> None:
    mapping = make_mapping()
    _native.copy_crc32c(mapping, [(b"kept", 0)], 1)
    view = mapping.view(0, 4, None)
    mapping.close()
    del mapping
    gc.collect()
    assert view.tobytes() == b"kept"


def _without_views() -> list[object]:
    mappings = [make_mapping() for _ in range(16)]
    for mapping in mappings:
        _native.prefault(mapping, 0, SIZE_BYTES, 1, written=True)
    return list(mappings)


def _views_of_closed() -> list[object]:
    mappings = [make_mapping() for _ in range(16)]
    views: list[object] = []
    for mapping in mappings:
        _native.prefault(mapping, 0, SIZE_BYTES, 1, written=True)
        views.append(mapping.view(0, SIZE_BYTES, None))
        mapping.close()
    return views


@pytest.fixture
def kept_gil() -> Iterator[None]:
    """A thread keeps the GIL until it gives the GIL away."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("kept_gil")
@pytest.mark.parametrize("make", [_without_views, _views_of_closed])
def test_other_threads_run_while_memory_is_unmapped(make: Callable[[], list[object]]) -> None:
    """A thread that the end of a mapping does not let run has no other chance to run."""

    def run() -> None:
        gate.acquire()
        ran.append(True)

    for _ in range(20):  # the system need not run the thread at once
        owners, gate, ran = make(), threading.Lock(), list[bool]()
        gate.acquire()
        thread = threading.Thread(target=run)
        thread.start()
        gate.release()
        owners.clear()
        has_run = bool(ran)
        thread.join(AMPLE_S)
        if has_run:
            return
    pytest.fail("no other thread ran")


def test_empty_views_and_empty_mappings() -> None:
    mapping = make_mapping(0)
    assert mapping.view(0, 0, None).shape == (0,)
    assert _native.copy_crc32c(mapping, [(b"", 0)], 1) == [0]
    _native.prefault(mapping, 0, 0, 1)
    assert make_mapping(10).view(10, 0, None).shape == (0,)


def test_closed_mapping_refuses_every_call(mapping: _native.Mapping, ends: Ends) -> None:
    mapping.close()
    mapping.close()
    calls = [
        lambda: mapping.view(0, 1, None),
        lambda: _native.copy_crc32c(mapping, [], 1),
        lambda: _native.crc32c_ranges(mapping, [], 1),
        lambda: _native.prefault(mapping, 0, 1, 1),
        lambda: _native.send_ranges(ends.sender.fileno(), mapping, [], 1),
        lambda: _native.receive_ranges(ends.sender.fileno(), mapping, [], 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()


OUTSIDE = [
    (0, SIZE_BYTES + 1),
    (SIZE_BYTES, 1),
    (SIZE_BYTES + 1, 0),
    (1, 2**64 - 1),
    (2**64 - 1, 2),
    (2**64, 1),
    (1, 2**64),
    (-1, 1),
    (0, -1),
]


@pytest.mark.parametrize(("offset", "nbytes"), OUTSIDE)
def test_ranges_outside_are_refused(
    mapping: _native.Mapping, ends: Ends, offset: int, nbytes: int
) -> None:
    calls = [
        lambda: mapping.view(offset, nbytes, None),
        lambda: _native.crc32c_ranges(mapping, [(0, 1), (offset, nbytes)], 1),
        lambda: _native.prefault(mapping, offset, nbytes, 1),
        lambda: _native.send_ranges(ends.sender.fileno(), mapping, [(offset, nbytes)], 1),
        lambda: _native.receive_ranges(ends.sender.fileno(), mapping, [(offset, nbytes)], 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"outside|must be in"):
            call()


def test_read_only_mapping_is_never_written(ends: Ends) -> None:
    mapping = make_mapping(100, writable=False)
    calls = [
        lambda: _native.copy_crc32c(mapping, [(b"a", 0)], 1),
        lambda: _native.prefault(mapping, 0, 100, 1),
        lambda: _native.receive_ranges(ends.receiver.fileno(), mapping, [(0, 1)], 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="read-only"):
            call()
