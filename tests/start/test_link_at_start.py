"""The event that says what the link between devices and host memory can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_link import FakeMachine

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.core.save.snapshot_plan import DeviceReads
from emergency_ckpt.state import link as links


def fields_of(
    tmp_path: Path, kind: type[EmergencyCheckpointer], reads: DeviceReads = "auto"
) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def note(event) -> None:
        if event.name == "start.link":
            found.append(dict(event.fields))

    tmp_path.chmod(0o700)
    settings = {"local_dir": str(tmp_path), "run_id": "run", "local_save_every": 1}
    with kind(**settings, device_reads=reads, on_event=note):
        pass
    (fields,) = found
    return fields


def test_start_says_what_was_found(tmp_path: Path) -> None:
    fields = fields_of(tmp_path, EmergencyCheckpointer)
    assert (fields["platform"], fields["way"], fields["maps"]) == ("cpu", "views", False)
    assert fields["why"]


def test_start_says_how_fast_a_direct_read_was(tmp_path: Path) -> None:
    link = FakeMachine().link()
    kind = type("EmergencyCheckpointer", (EmergencyCheckpointer,), {"_link": link})
    fields = fields_of(tmp_path, kind)
    assert (fields["way"], fields["maps"], fields["why"]) == ("direct", True, "")
    assert fields["gb_s"] == link.facts.gb_s


@pytest.mark.parametrize("way", ["pinned_host", "pageable"])
def test_start_says_how_fast_the_way_of_the_user_is(tmp_path: Path, way: DeviceReads) -> None:
    link = FakeMachine().link()
    kind = type("EmergencyCheckpointer", (EmergencyCheckpointer,), {"_link": link})
    fields = fields_of(tmp_path, kind, way)
    assert (fields["way"], fields["maps"]) == (way, True)
    assert fields["gb_s"] > 0
    assert fields["gb_s"] != link.facts.gb_s  # of the direct way


def test_link_is_found_out_once_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[links.Link] = []

    def probe(devices: Any) -> links.Link:
        made.append(FakeMachine().link())
        return made[-1]

    monkeypatch.setattr(links, "_found", None)
    monkeypatch.setattr(links, "probe", probe)
    first, second = (fields_of(tmp_path, EmergencyCheckpointer) for _ in range(2))
    assert len(made) == 1
    assert first == second
