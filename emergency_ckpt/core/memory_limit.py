"""Decides if new pages of a ramdisk fit below the limits on memory, such as that of a job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on memory, in bytes.

    Attributes:
      name: what has it, for people.
      charged_bytes: what counts in it. Pages of a tmpfs count where they were first touched, also
        after the process has ended.
      reclaimable_bytes: page cache among that, which the kernel gives up before it kills.
    """

    name: str
    limit_bytes: int
    charged_bytes: int = 0
    reclaimable_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Return the bytes that may still be taken."""
        return max(self.limit_bytes - self.charged_bytes + self.reclaimable_bytes, 0)


def tightest(limits: Iterable[MemoryLimit]) -> MemoryLimit | None:
    """Return the limit that leaves least, or None without any."""
    return min(limits, key=lambda limit: limit.left_bytes, default=None)


def fits_limits(new_bytes: int, limits: Iterable[MemoryLimit]) -> tuple[bool, str]:
    """Return whether ``new_bytes`` of new pages fit, and why not.

    Pages that are there already, also of a process that has ended, are no new ones. Swap does not
    count: a ramdisk there is no ramdisk.
    """
    least = tightest(limits)
    if least is None or new_bytes <= least.left_bytes:
        return True, ""
    used_bytes = least.charged_bytes - least.reclaimable_bytes
    return False, (
        f"the memory limit of {least.name} is {least.limit_bytes} bytes, of which {used_bytes} are"
        f" taken: {least.left_bytes} are left for {new_bytes} bytes of new pages"
    )
