"""The values that a config stores in place of those that a user gave in another form."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

from emergency_ckpt.core.placement.placement_policies import parse_policy
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.paths import resolved

_LOCAL_DIRECTORY = "/dev/shm/eckpt"  # noqa: S108 - every Linux has this ramdisk; claimed with a lock


def run_id_of(directory: str) -> str:
    """Return the run id of a persistent directory: its last name and a digest of its whole path."""
    stripped = resolved(directory)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stripped.rsplit("/", maxsplit=1)[-1])[:40] or "run"
    return f"{name}-{hashlib.sha256(stripped.encode()).hexdigest()[:16]}"


def default_local_dir(environ: Mapping[str, str]) -> str:
    """Return the directory in RAM of a job that names none: ECKPT_LOCAL_DIR, else a usual place."""
    return environ.get("ECKPT_LOCAL_DIR") or _LOCAL_DIRECTORY


def as_text(path: Any) -> Any:
    """Return the text of a path object; any other value as it is, for the validation to name."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def as_policy(placement: Any) -> Any:
    """Return the placement policy of a text; an invalid text as it is, for the validation."""
    with contextlib.suppress(ConfigError):
        return parse_policy(placement) if isinstance(placement, str) else placement
    return placement
