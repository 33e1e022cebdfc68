"""The checkpointers under comparison, all behind the same interface.

A contender's module is imported only in the processes that run it, so that no checkpointer is
slowed down, or helped, by the imports of another one.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the process that only starts others does without JAX
    import jax

PyTree = Any

RAM, STORAGE, BOTH = "ram", "storage", "both"

MODULES = {
    "ours": "benchmarks.common.contenders.ours",
    "orbax-emergency": "benchmarks.common.contenders.orbax_emergency",
    "orbax-p2p": "benchmarks.common.contenders.orbax_p2p",
    "orbax": "benchmarks.common.contenders.orbax_plain",
}


def tiers(name: str) -> tuple[str, ...]:
    """Return the tiers that a contender has."""
    return (STORAGE,) if name == "orbax" else (RAM, STORAGE)


class CannotRestore(Exception):
    """The contender finds nothing to restore. All processes raise it."""


@dataclasses.dataclass(frozen=True)
class Site:
    """The job as one process sees it: the input of every checkpointer."""

    mesh: "jax.sharding.Mesh"
    replica_axis: int
    abstract_state: PyTree
    """jax.ShapeDtypeStruct leaves with shardings over the whole mesh."""
    tier: str
    """RAM: every save goes to the ramdisks only. STORAGE: to ``persistent_dir`` only. BOTH: to the
    ramdisks, and each step that ``stored_every`` divides to ``persistent_dir`` too.
    """
    local_dir: Path
    """Directory on the ramdisk of this host. It exists."""
    persistent_dir: Path
    """Directory that all hosts share. It exists."""
    bind_host: str
    """Address on which the contender's own sockets listen."""
    stored_every: int = 1


class Session(Protocol):
    """One checkpointer in one process. All calls are collective, in the same order.

    Ours has two attributes more: ``ready_s``, the seconds of the last ``save`` in which it waited
    for arrays that were still being computed, and ``spent_s``, the seconds of the last restore on
    this process by the parts of the event ``restore.phases``.
    """

    def start_fresh(self) -> None:
        """Look for a checkpoint, as before the first step; RuntimeError if one exists."""

    def save(self, step: int, state: PyTree) -> None:
        """Start a save. Returns when the caller may donate ``state``."""

    def wait(self) -> None:
        """Block until a restore could use the last save. Raises if that save failed."""

    def newest(self) -> tuple[int | None, PyTree]:
        """Return the newest step that the contender offers, and its state; None: it has none.

        The state has the shardings of ``Site.abstract_state``.
        """

    def close(self) -> None:
        """Release threads, sockets and files."""


def restore(session: Session, step: int) -> PyTree:
    """Return the state of ``step``. CannotRestore when the contender offers another, or none."""
    found, state = session.newest()
    if found != step:
        raise CannotRestore(f"offers step {found}, not {step}")
    return state


class Contender(Protocol):
    """The functions that each module of this package defines."""

    def prepare(self) -> None:
        """Do the set-up that a trainer does once at start, even without a restore. Not timed."""

    def open_session(self, site: Site) -> Session:
        """Build the checkpointer. Its time is part of a restore's."""


def load(name: str) -> Contender:
    """Import the contender called ``name``. KeyError for an unknown name."""
    # A module with these two functions satisfies the protocol.
    return importlib.import_module(MODULES[name])  # type: ignore[return-value]
