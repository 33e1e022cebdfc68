"""The hosts, processes and slices of a job. Pure.

A host is a machine: it owns a ramdisk and keeps its number during the whole job. A process index is
a label that a host gets in each life. JAX on CPU orders devices by process index, so the mesh row
of a process, and its slice, follow from the index: ``slice = process_index // hosts_per_slice``. So
when indices are permuted across slices, a host changes its slice and keeps its RAM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class JobLayout:
    """The hosts of one life of the job.

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
        """Return the topology of the first life: host ``i`` runs process ``i``."""
        return cls(slices, hosts_per_slice, tuple(range(slices * hosts_per_slice)))

    @property
    def process_count(self) -> int:
        """Return the number of processes in the job, which is also the number of hosts."""
        return len(self.host_of_process)

    def slice_of(self, process: int) -> int:
        """Return the slice of ``process``."""
        return process // self.hosts_per_slice

    def processes_of_slice(self, slice_index: int) -> tuple[int, ...]:
        """Return the processes of one slice, ascending."""
        first = slice_index * self.hosts_per_slice
        return tuple(range(first, first + self.hosts_per_slice))

    def process_on(self, host: int) -> int:
        """Return the process that runs on ``host`` in this life."""
        return self.host_of_process.index(host)

    def hosts_of(self, processes: Sequence[int]) -> tuple[int, ...]:
        """Return the hosts that run ``processes``, ascending."""
        return tuple(sorted(self.host_of_process[process] for process in processes))

    def renumbered(self, new_index: Sequence[int]) -> JobLayout:
        """Return the topology in which process ``i`` has the index ``new_index[i]``.

        Args:
          new_index: a permutation of all process indices. In the first life, in which host and
            process numbers are equal, it is the new index of each host.
        """
        hosts = [0] * self.process_count
        for old, new in enumerate(new_index):
            hosts[new] = self.host_of_process[old]
        return replace(self, host_of_process=tuple(hosts))
