"""One reply of a bucket has a wrong bit, and the object is sound: no older step is restored."""

from __future__ import annotations

from programs import printed_beside_bucket

READ = {
    "host_state/log/*",
    "host_state/4/marker.json",
    "host_state/4/checksums.json",
    "host_state/4/process_*",
    "4/_CHECKPOINT_METADATA",
    "4/state/manifest.ocdbt",
    "4/state/d/*",
}
FOR_A_CHANGE = "4/state/manifest.ocdbt 1"
"""TensorStore asks for it again, only to see whether it has changed."""


def test_restore_after_one_wrong_read_takes_the_newest_step() -> None:
    found = printed_beside_bucket("wrong_reads_program.py", *sorted(READ))
    assert {name.rpartition(" ")[0] for name in found} == READ
    assert {"host_state/log/* 1", "4/state/d/* 1"} < found.keys()
    for name, restored in found.items():
        assert restored["step"] == restored["at"] == 4, name
        assert restored["same"], name
        assert restored["is_told"] or name == FOR_A_CHANGE, name
