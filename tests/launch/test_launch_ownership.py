"""A local root that another user made first, or may write to, is not taken over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launch_support import MakeSpec, run_job

from emergency_ckpt.errors import LocalTierError

STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def refused(make_spec: MakeSpec, problem: str) -> None:
    """No process was started; what JAX compiled for somebody else would be code to run."""
    spec = make_spec("train(1)")
    with pytest.raises(LocalTierError, match=problem):
        run_job(spec)
    assert not spec.log_path(0, 0).exists()


@as_root
@pytest.mark.parametrize("inner", ["", "supervisor"])
def test_local_root_of_another_user_is_refused(make_spec: MakeSpec, inner: str) -> None:
    root = make_spec("").local_root
    cache = root / "supervisor" / "compilation_cache"
    cache.mkdir(parents=True, mode=0o700)
    root.chmod(0o755)
    os.chown(root / inner, STRANGER, STRANGER)
    refused(make_spec, f"belongs to user {STRANGER}")


@pytest.mark.parametrize(("inner", "mode"), [("", 0o777), ("supervisor", 0o755)])
def test_local_root_open_to_others_is_refused(make_spec: MakeSpec, inner: str, mode: int) -> None:
    root = make_spec("").local_root
    (root / "supervisor").mkdir(parents=True, mode=0o700)
    root.chmod(0o755)
    (root / inner).chmod(mode)
    refused(make_spec, "write in it|open to others")


def test_local_root_that_leads_elsewhere_is_refused(make_spec: MakeSpec, tmp_path: Path) -> None:
    root = make_spec("").local_root
    root.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (root / "supervisor").symlink_to(tmp_path / "elsewhere")
    refused(make_spec, "link")


def test_local_root_that_was_there_stays(make_spec: MakeSpec) -> None:
    """It may be a mount, which cannot be removed, or a directory of the user's."""
    spec = make_spec("train(1)", keep_ram="never")
    spec.local_root.mkdir(parents=True)
    assert run_job(spec).error is None
    assert [*spec.local_root.iterdir()] == []
