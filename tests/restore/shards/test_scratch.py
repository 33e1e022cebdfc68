"""Memory for fetched shards that are used and not kept."""

from __future__ import annotations

import resource

import pytest

from emergency_ckpt import _native
from emergency_ckpt.cluster.shard_source import Scratch
from emergency_ckpt.errors import LocalTierError


def test_views_have_what_was_written_and_outlive_the_scratch() -> None:
    scratch = Scratch(128)
    _native.copy_crc32c(scratch.mapping, [(b"\x05" * 64, 64)], 1)
    view = scratch.view(64, 64)
    del scratch
    assert bytes(view) == b"\x05" * 64
    assert not view.flags.writeable


def test_nothing_to_hold_is_no_error() -> None:
    scratch = Scratch(0)
    assert scratch.view(0, 0).nbytes == 0


def test_system_that_gives_no_file_is_a_clear_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(LocalTierError, match="make 64 bytes of memory"):
            Scratch(64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
