"""Steps whose folders have a prefix or padding, beside steps with other names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from persistent_steps import POINTS, RUN_ID, complete_steps, save_over, value_of, writer_of
from persistent_steps import life as life_of

from emergency_ckpt.core.step_log import Entry
from emergency_ckpt.core.timeline import continued
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.storage import PersistentTier, StorageDirectory
from emergency_ckpt.storage.step_folders import INSPECTED_AT_MOST, StepFolders
from emergency_ckpt.types import SaveId

NAMED = "ckpt_00000"


class Killed(BaseException):
    """The end of a process."""


def tier_of(directory: Path, step_name: str = NAMED) -> PersistentTier:
    return PersistentTier(str(directory), step_name=step_name)


def entries(tier: PersistentTier) -> list[Entry]:
    table = tier.found.log.read().table
    assert table is not None
    return list(table.steps)


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"host_state"}


def test_saved_step_has_its_name_and_readers_need_no_setting(tmp_path: Path) -> None:
    save_over(tier_of(tmp_path), 5, 50, life_of(1))
    save_over(tier_of(tmp_path), 1234567, 70, life_of(2))
    assert names_in(tmp_path) == {"ckpt_00005", "ckpt_1234567"}
    reader = PersistentTier(str(tmp_path))
    assert complete_steps(reader) == [5, 1234567]
    assert [value_of(reader, step) for step in (5, 1234567)] == [50, 70]
    assert [each.folder for each in entries(reader)] == ["ckpt_00005", "ckpt_1234567"]


def test_steps_of_several_formats_are_one_run(tmp_path: Path) -> None:
    for number, name in enumerate(("0", NAMED, "other_0", "0000"), start=1):
        save_over(tier_of(tmp_path, name), number, 10 * number, life_of(number))
    assert names_in(tmp_path) == {"1", "ckpt_00002", "other_3", "0004"}
    reader = PersistentTier(str(tmp_path))
    assert [value_of(reader, step) for step in complete_steps(reader)] == [10, 20, 30, 40]


@pytest.mark.parametrize("point", POINTS)
def test_number_saved_anew_under_another_name_is_one_step(tmp_path: Path, point: str) -> None:
    """A crash at any instant of the second save leaves one step of the number at most, whole."""
    save_over(tier_of(tmp_path, "0"), 4, 40, life_of(1))
    save_over(tier_of(tmp_path, "0"), 5, 50, life_of(1))
    chain = continued(None, SaveId(4, life_of(1), RUN_ID), life_of(2))

    def die(at: str) -> None:
        if at == point:
            raise Killed

    with pytest.raises(Killed):
        save_over(tier_of(tmp_path), 5, 51, life_of(2), chain=chain, at=die)
    reader = PersistentTier(str(tmp_path))
    left = {"claimed": [50], "marked": [51], "published": [51]}.get(point, [])
    assert complete_steps(reader) == ([4, 5] if left else [4])
    assert [value_of(reader, 5) for _ in left] == left
    # The next life has the first format again, and clears what the second left.
    save_over(tier_of(tmp_path, "0"), 6, 60, life_of(3))
    assert complete_steps(reader) == ([4, 5, 6] if left else [4, 6])
    assert [value_of(reader, 5) for _ in left] == left
    again = continued(chain, SaveId(4, life_of(1), RUN_ID), life_of(4))
    save_over(tier_of(tmp_path, "0"), 5, 52, life_of(4), chain=again)
    assert (complete_steps(reader), value_of(reader, 5)) == ([4, 5], 52)
    assert names_in(tmp_path) & {"5", "ckpt_00005"} == {"5"}


@pytest.mark.parametrize("point", POINTS[:-2])
def test_remains_under_an_earlier_name_are_removed(tmp_path: Path, point: str) -> None:
    save_over(tier_of(tmp_path), 4, 40, life_of(1))

    def die(at: str) -> None:
        if at == point:
            raise Killed

    with pytest.raises(Killed):
        save_over(tier_of(tmp_path), 5, 50, life_of(2), at=die)
    save_over(tier_of(tmp_path, "0"), 6, 60, life_of(3))
    assert names_in(tmp_path) == {"ckpt_00004", "6"}
    assert not (tmp_path / "host_state" / "5").exists()


def test_step_of_plain_orbax_of_the_number_does_not_count(tmp_path: Path) -> None:
    """Of two folders of one number that counts which the log, or else a marker, names."""
    tier = tier_of(tmp_path)
    save_over(tier, 5, 50, life_of(1))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.StandardSave({"w": np.full(4, 1)}))
    assert names_in(tmp_path) == {"5", "ckpt_00005"}
    assert value_of(tier, 5) == 50
    for version in (tmp_path / "host_state" / "log").iterdir():
        version.unlink()
    tier = tier_of(tmp_path)
    assert complete_steps(tier) == [5]
    assert value_of(tier, 5) == 50
    save_over(tier, 6, 60, life_of(2))
    assert [value_of(tier, step) for step in complete_steps(tier)] == [50, 60]


def test_marker_without_its_folder_is_no_step_of_another(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    save_over(tier, 5, 50, life_of(1))
    marker = tmp_path / "host_state" / "5" / "marker.json"
    marker.write_bytes(marker.read_bytes()[:-9])
    with pytest.raises(CorruptData, match=r"its marker .* cannot be used"):
        value_of(tier, 5)


def test_remove_takes_the_folder_of_any_name(tmp_path: Path) -> None:
    for number, name in enumerate(("0", NAMED, "other_0"), start=1):
        save_over(tier_of(tmp_path, name), number, 10 * number, life_of(number))
    writer = writer_of(tier_of(tmp_path))
    writer.hold(life_of(4))
    writer.remove([1, 2], life_of(4))
    assert names_in(tmp_path) == {"other_3"}


@pytest.mark.dear
def test_search_for_kinds_of_names_ends_at_its_bound(tmp_path: Path) -> None:
    """The newest folders of both kinds are looked at first: the last look is at ``b_2``."""
    steps = range(1, INSPECTED_AT_MOST // 2 + 2)
    names = [f"{prefix}_{step}" for prefix in "ab" for step in steps]
    for real in ("b_2", "a_1"):
        (tmp_path / real).mkdir()
        (tmp_path / real / "_CHECKPOINT_METADATA").write_text("{}")
    found = StepFolders(StorageDirectory(str(tmp_path), 60.0), None).steps(names, ())
    assert found == {step: (f"b_{step}",) for step in steps}
