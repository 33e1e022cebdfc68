"""``eckpt diff`` reads a large leaf in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from looks import eckpt_here

from emergency_ckpt.storage import step_reader


def diff(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    """Return the exit status, and the differences by leaf."""
    code = eckpt_here("diff", "--json", *words)
    out = capsys.readouterr().out
    found = json.loads(out)["differences"] if out else ()
    return code, {each["path"]: each for each in found}


def orbax_step(folder: Path, state: dict[str, Any]) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)
    return folder


def test_diff_large_leaf_is_read_in_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_reader, "PIECE_BYTES", 1 << 10)
    w = np.arange(40_000, dtype=np.float32).reshape(400, 100)
    changed = w.copy()
    changed[399, 99] += 2
    a, b = (orbax_step(tmp_path / name, {"w": x}) for name, x in (("a", w), ("b", changed)))
    assert len(list(step_reader.split(((0, 400), (0, 100)), (7, 100), 4))) == 58
    code, found = diff(capsys, a, b)
    assert code == 1
    assert (found["w"]["elements"], found["w"]["largest"]) == (1, 2.0)
