"""The memory that ``eckpt doctor`` counts on in a container."""

from __future__ import annotations

from pathlib import Path

from emergency_ckpt.tools.cli.doctor.memory import available_bytes


def test_memory_smallest_cgroup_limit_counts(tmp_path: Path) -> None:
    inner = tmp_path / "pod" / "container"
    inner.mkdir(parents=True)
    (tmp_path / "groups").write_text("0::/pod/container\n")
    for folder, limit in ((inner, "max\n"), (tmp_path / "pod", "5000\n")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("4500\n")
        (folder / "memory.stat").write_text("anon 4000\ninactive_file 300\n")
    found = available_bytes(tmp_path, tmp_path / "groups")
    assert found == (800, f"cgroup {tmp_path / 'pod'}")
