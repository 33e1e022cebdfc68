"""The job in which every contender runs: its shape, and the orders for its processes."""

import dataclasses
import json
import re
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
    def name(self) -> str:
        """The text from which ``parse_job`` made this shape."""
        mib = self.state_bytes / 2**20
        return f"{self.slices}x{self.hosts_per_slice}x{mib:g}/{self.leaves}"

    @property
    def process_count(self) -> int:
        return self.slices * self.hosts_per_slice

    @property
    def state_bytes(self) -> int:
        """Bytes of one copy of the state. Each slice holds a whole copy."""
        return self.leaves * self.rows_per_leaf * ROW_BYTES


_JOB = re.compile(r"(\d{1,4})x(\d{1,4})x(\d{1,7})(?:/(\d{1,6}))?")
_USUAL_LEAVES = 16


def parse_job(text: str, timed_saves: int) -> Shape:
    """Return the shape for ``SLICESxHOSTSxMIB`` or ``SLICESxHOSTSxMIB/LEAVES``.

    The leaves are equal, and their rows divide evenly over the hosts of a slice. ValueError for any
    other text, and when the job has no other slice to restore from or the leaves would be empty.
    """
    if not (found := _JOB.fullmatch(text)):
        raise ValueError(f"{text!r} is not SLICESxHOSTSxMIB or SLICESxHOSTSxMIB/LEAVES")
    slices, hosts, mib, leaves = (int(part or _USUAL_LEAVES) for part in found.groups())
    if slices < 2:
        raise ValueError(f"the comparison loses a slice, so it needs at least 2 (got {slices})")
    if min(hosts, mib, leaves) < 1:
        raise ValueError("hosts per slice, MiB and leaves must be at least 1")
    rows = mib * 2**20 // (leaves * ROW_BYTES) // hosts * hosts
    if rows == 0:
        raise ValueError(f"{leaves} leaves of {hosts * ROW_BYTES} bytes do not fit in {mib} MiB")
    return Shape(slices, hosts, leaves, rows, timed_saves)


NOTHING_LOST, SLICE_LOST, HALVES_LOST = "nothing", "slice", "halves"
FROM_STORAGE = "storage"
SCENARIOS = (NOTHING_LOST, SLICE_LOST, HALVES_LOST, FROM_STORAGE)


def lost_hosts(scenario: str, shape: Shape) -> tuple[int, ...] | None:
    """Return the hosts that lose their ramdisks, numbered slice by slice; one slice is the first.

    None when the scenario does not apply to the job. With half-lost slices each slice loses a
    different host than its neighbour: no slice is whole, but every shard still exists. Slices of
    one host have no halves.
    """
    hosts = shape.hosts_per_slice
    if scenario == NOTHING_LOST:
        return ()
    if scenario == SLICE_LOST:
        return tuple(range(hosts))
    if scenario == HALVES_LOST:
        return tuple(s * hosts + s % hosts for s in range(shape.slices)) if hosts > 1 else None
    return tuple(range(shape.process_count))


@dataclasses.dataclass(frozen=True)
class Orders:
    """The orders for all processes for one tier's part of a round, as a JSON file in ``root``.

    The first life of the job saves and each later one restores.
    """

    contender: str
    shape: Shape
    tier: str
    bind_host: str | None
    """Address for the contender's own sockets; None: the address in each process's hosts file."""
    persistent_dir: str
    root: str

    @property
    def path(self) -> Path:
        return Path(self.root, "orders.json")

    @property
    def expected_path(self) -> Path:
        """File with the expected step and digests. It exists from the second life on."""
        return Path(self.root, "expected.json")

    def result_path(self, life: int, process_index: int) -> Path:
        return Path(self.root, f"life_{life}_process_{process_index:05}.json")

    def write(self) -> None:
        self.path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> "Orders":
        fields: dict[str, Any] = json.loads(path.read_text())
        return cls(**(fields | {"shape": Shape(**fields["shape"])}))
