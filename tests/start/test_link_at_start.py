"""The event that says what the link between devices and host memory can do."""

from __future__ import annotations

from pathlib import Path

from fake_link import FakeMachine

from emergency_ckpt import EmergencyCheckpointer


def fields_of(tmp_path: Path, kind: type[EmergencyCheckpointer]) -> dict[str, object]:
    found: list[dict[str, object]] = []

    def note(event) -> None:
        if event.name == "start.link":
            found.append(dict(event.fields))

    tmp_path.chmod(0o700)
    with kind(local_dir=str(tmp_path), run_id="run", local_save_every=1, on_event=note):
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
