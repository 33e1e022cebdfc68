"""``eckpt diff``: between steps in RAM, steps in storage and folders of plain Orbax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from damage import flip
from faults import leaves_are_read_in_pieces
from looks import eckpt_here, tree_of
from persistent_steps import fill
from tiers_support import LAYOUT, W_SHARD, whole_steps


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


def spoil(directory: Path) -> None:
    """Flip a byte of params/w in each slot of a process directory."""
    for slot in directory.glob("slot_*.bin"):
        flip(slot, LAYOUT.shards[W_SHARD].offset)


def test_diff_ram_steps_names_leaves_and_changes_nothing(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_steps(ramdisk, 10, 20)
    before = tree_of(ramdisk)
    assert diff(capsys, "10", "ram:10", "--local-dir", ramdisk) == (0, {})
    code, found = diff(capsys, "10", "newest", "--local-dir", ramdisk)
    assert code == 1
    assert set(found) == {"count", "params/b", "params/w", "rng"}  # "empty" has no element
    assert found["params/w"]["of"] == 64 * 32
    assert tree_of(ramdisk) == before


def test_diff_damaged_copy_is_passed_over_for_a_sound_one(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = whole_steps(ramdisk, 10, 20)
    spoil(first)
    assert diff(capsys, "10", "10", "--local-dir", ramdisk)[0] == 0
    spoil(second)
    assert eckpt_here("diff", "10", "10", "--local-dir", ramdisk) == 3
    assert "no copy is sound" in capsys.readouterr().err


def test_diff_folders_tells_every_kind_of_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"same": np.array([1.0, np.nan]), "n": {"l": [np.arange(3), np.arange(4)]}}
    x = np.array([1.0, 2.0, np.nan, np.inf], ml_dtypes.bfloat16)
    y = np.array([1.0, 2.5, 7.0, np.inf], ml_dtypes.bfloat16)
    i = np.array([0, 2**63 - 1])
    mine = {"shape": np.zeros(2), "dtype": np.zeros(2), "a": np.zeros(1), "x": x, "i": i, **same}
    other = {"shape": np.zeros(3), "dtype": np.zeros(2, "f4"), "b": np.zeros(1), "x": y, **same}
    a = orbax_step(tmp_path / "a", mine)
    b = orbax_step(tmp_path / "b", {**other, "i": np.array([0, 1 - 2**63])})
    code, found = diff(capsys, a, b)
    assert code == 1
    assert {path: each["kind"] for path, each in found.items()} == {
        "a": "only_in_a",
        "b": "only_in_b",
        "dtype": "dtype",
        "i": "values",
        "shape": "shape",
        "x": "values",
    }
    assert found["x"] == {
        **{"path": "x", "kind": "values", "elements": 2, "of": 4},
        **{"largest": 0.5, "not_numbers": 1},
    }
    assert found["i"]["largest"] == float(2**64 - 2)
    assert diff(capsys, a, a) == (0, {})


def test_diff_storage_step_against_its_own_folder_is_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(str(tmp_path), [3, 7])
    before = tree_of(tmp_path)
    assert diff(capsys, "storage:7", tmp_path / "7", "--dir", tmp_path) == (0, {})
    code, found = diff(capsys, "3", "newest", "--dir", tmp_path)
    assert code == 1
    assert found["w"]["largest"] == 4.0
    assert tree_of(tmp_path) == before


def test_diff_large_leaf_is_read_in_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces_of = leaves_are_read_in_pieces(monkeypatch, 1 << 10)
    w = np.arange(40_000, dtype=np.float32).reshape(400, 100)
    changed = w.copy()
    changed[399, 99] += 2
    a, b = (orbax_step(tmp_path / name, {"w": x}) for name, x in (("a", w), ("b", changed)))
    assert pieces_of(((0, 400), (0, 100)), (7, 100), 4) == 58
    code, found = diff(capsys, a, b)
    assert code == 1
    assert (found["w"]["elements"], found["w"]["largest"]) == (1, 2.0)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["10", "11"], 2, "needs --local-dir or --dir"),
        (["10", "11", "--local-dir", "RAM"], 3, "find 11: no such whole step"),
        (["10", "storage:10", "--local-dir", "RAM"], 3, "find storage:10"),
        (["ram:10", "/absent/folder", "--local-dir", "RAM"], 3, "open /absent/folder"),
        (["10"], 2, "required: B"),
    ],
)
def test_diff_bad_names_are_errors(
    ramdisk: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    text: str,
) -> None:
    whole_steps(ramdisk, 10, processes=[0])
    try:
        found = eckpt_here("diff", *(str(ramdisk) if word == "RAM" else word for word in words))
    except SystemExit as error:
        found = error.code
    assert found == code
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "int4", "complex64", "uint64"])
def test_diff_tells_the_largest_of_each_kind_of_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    kind = getattr(ml_dtypes, dtype, dtype)
    a, b = (
        orbax_step(tmp_path / name, {"x": np.array(values).astype(kind)})
        for name, values in (("a", [1, 2, 3]), ("b", [1, 5, 2]))
    )
    code, found = diff(capsys, a, b)
    assert (code, found["x"]["elements"], found["x"]["largest"]) == (1, 2, 3.0)
    assert not found["x"].get("not_numbers")
