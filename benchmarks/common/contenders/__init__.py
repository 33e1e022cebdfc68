"""The checkpointers under comparison, each behind the same calls.

A contender's module is imported only in the processes that run it, so that no
checkpointer pays for, or profits from, what another one imports.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # the process that only starts others does without JAX
    import jax

PyTree = Any

RAM, STORAGE = "ram", "storage"

MODULES = {
    "ours": "benchmarks.common.contenders.ours",
    "orbax-emergency": "benchmarks.common.contenders.orbax_emergency",
    "orbax-p2p": "benchmarks.common.contenders.orbax_p2p",
    "orbax": "benchmarks.common.contenders.orbax_plain",
}

_STORAGE_ONLY = ("orbax",)


def tiers(name: str) -> tuple[str, ...]:
    """The tiers that a contender has."""
    return (STORAGE,) if name in _STORAGE_ONLY else (RAM, STORAGE)


class CannotRestore(Exception):
    """The contender has nothing that it could restore; raised by all processes alike."""


@dataclasses.dataclass(frozen=True)
class Site:
    """What every checkpointer is given: the job as this process sees it."""

    mesh: "jax.sharding.Mesh"
    replica_axis: int
    abstract_state: PyTree
    """jax.ShapeDtypeStruct leaves with shardings over the whole mesh."""
    tier: str
    """RAM: every save goes to the ramdisks only. STORAGE: to ``persistent_dir`` only."""
    local_dir: Path
    """On the ramdisk of this host; exists."""
    persistent_dir: Path
    """Shared by all hosts; exists."""
    bind_host: str
    """Where the contender's own sockets listen."""


class Session(Protocol):
    """One checkpointer in one process. All calls are collective, in the same order everywhere."""

    def start_fresh(self) -> None:
        """What a loop asks before its first step. RuntimeError where there is a checkpoint."""

    def save(self, step: int, state: PyTree) -> None:
        """Start a save. Returns when the caller may donate ``state``."""

    def wait(self) -> None:
        """Block until the last save could be restored from, then raise if it failed."""

    def restore(self, step: int) -> PyTree:
        """The state of ``step`` with the shardings of ``Site.abstract_state``.

        Raises CannotRestore where the contender itself says that there is nothing to restore.
        """

    def close(self) -> None:
        """Release threads, sockets and files."""


@runtime_checkable
class Prefetching(Protocol):
    """A session that can restore in the background, while the caller compiles."""

    def prefetch(self) -> None:
        """Begin the next ``restore`` now. Collective; does not block."""

    @property
    def hidden_s(self) -> float:
        """Seconds by which the last ``restore`` was shorter for that."""
        ...


class Contender(Protocol):
    """What a module in this package defines."""

    def prepare(self) -> None:
        """What a trainer does once at start, whether it restores or not. Not timed."""

    def open_session(self, site: Site) -> Session:
        """Build the checkpointer. Timed as a part of a restore."""


def load(name: str) -> Contender:
    """Import one contender. KeyError when there is none of that name."""
    # A module with these two functions satisfies the protocol.
    return importlib.import_module(MODULES[name])  # type: ignore[return-value]
