"""The job that every contender runs in: its shape, and the orders for its processes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

ROW_ITEMS = 1024  # float32 values in a row of a leaf: 4 KiB
ROW_BYTES = ROW_ITEMS * 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of the job. One process and one device per host."""

    slices: int
    hosts_per_slice: int
    leaves: int
    rows_per_leaf: int
    timed_saves: int

    @property
    def process_count(self) -> int:
        return self.slices * self.hosts_per_slice

    @property
    def state_bytes(self) -> int:
        """Bytes of one copy of the state, the whole of which each slice holds."""
        return self.leaves * self.rows_per_leaf * ROW_BYTES


def plan_shape(slices: int, hosts_per_slice: int, mib: int, leaves: int, timed_saves: int) -> Shape:
    """Cut ``mib`` MiB into equal leaves whose rows divide evenly over the hosts of a slice.

    ValueError when the job has no other slice to restore from, or the leaves would be empty.
    """
    if slices < 2:
        raise ValueError(f"the comparison loses a slice, so it needs at least 2 (got {slices})")
    if min(hosts_per_slice, mib, leaves, timed_saves) < 1:
        raise ValueError("hosts per slice, MiB, leaves and saves must be at least 1")
    rows = mib * 2**20 // (leaves * ROW_BYTES) // hosts_per_slice * hosts_per_slice
    if rows == 0:
        raise ValueError(
            f"{leaves} leaves of {hosts_per_slice * ROW_BYTES} bytes do not fit in {mib} MiB"
        )
    return Shape(slices, hosts_per_slice, leaves, rows, timed_saves)


@dataclasses.dataclass(frozen=True)
class Orders:
    """What all processes of a round are told, as a JSON file. The first life of the job saves, the
    second restores; what a process is called it learns from the launcher.
    """

    contender: str
    shape: Shape
    persistent_dir: str
    results_dir: str
    """Gets a JSON file from each process of each life."""
    expected_path: str
    """Step and digests that a restore must find; exists in the second life."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> "Orders":
        fields: dict[str, Any] = json.loads(path.read_text())
        return cls(**(fields | {"shape": Shape(**fields["shape"])}))

    def result_path(self, life: int, process_index: int) -> Path:
        return Path(self.results_dir) / f"life_{life}_process_{process_index:05}.json"

    def results(self, life: int) -> list[Path]:
        return [self.result_path(life, index) for index in range(self.shape.process_count)]
