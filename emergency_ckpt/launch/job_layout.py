"""Which host runs which process, and which slice that process belongs to. Pure.

A host is a physical thing: it owns a ramdisk and keeps its number for as long as the job lives. A
process index is a label that a host gets anew in each life. JAX on CPU orders devices by process
index, so the mesh row of a process, and with it its slice, follows from the index alone:
``slice = process_index // hosts_per_slice``. When indices are permuted across slices, a host
therefore changes its slice and keeps its RAM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class JobLayout:
    """Hosts of one life of the job.

    Attributes:
      slices: number of slices.
      hosts_per_slice: processes in each slice, one per host.
      host_of_process: the host that runs each process index; a permutation of all hosts.
    """

    slices: int
    hosts_per_slice: int
    host_of_process: tuple[int, ...]

    @classmethod
    def first(cls, slices: int, hosts_per_slice: int) -> JobLayout:
        """The first life: host ``i`` runs process ``i``."""
        return cls(slices, hosts_per_slice, tuple(range(slices * hosts_per_slice)))

    @property
    def process_count(self) -> int:
        """Processes in the job, which is also the number of hosts."""
        return len(self.host_of_process)

    def slice_of(self, process: int) -> int:
        """The slice that ``process`` belongs to."""
        return process // self.hosts_per_slice

    def processes_of_slice(self, slice_index: int) -> tuple[int, ...]:
        """The processes of one slice, ascending."""
        first = slice_index * self.hosts_per_slice
        return tuple(range(first, first + self.hosts_per_slice))

    def process_on(self, host: int) -> int:
        """The process that runs on ``host`` now."""
        return self.host_of_process.index(host)

    def hosts_of(self, processes: Sequence[int]) -> tuple[int, ...]:
        """The hosts that run ``processes``, ascending."""
        return tuple(sorted(self.host_of_process[process] for process in processes))

    def renumbered(self, new_index: Sequence[int]) -> JobLayout:
        """The topology after process ``i`` was given the index ``new_index[i]``.

        Args:
          new_index: a permutation of all process indices. In the first life, where host and
            process numbers are equal, it says directly which index each host gets.
        """
        hosts = [0] * self.process_count
        for old, new in enumerate(new_index):
            hosts[new] = self.host_of_process[old]
        return replace(self, host_of_process=tuple(hosts))
