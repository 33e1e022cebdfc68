"""Plain Orbax: asynchronous saves to storage, each process reads its own shards. No RAM tier."""

from pathlib import Path

import orbax.checkpoint as ocp

from benchmarks.common.contenders import PyTree, Site
from benchmarks.common.contenders.orbax_base import OrbaxSession


def prepare() -> None:
    """Do nothing, because plain Orbax needs no set-up."""


def plain_session(
    directory: Path, abstract_state: PyTree, max_to_keep: int | None = None
) -> OrbaxSession:
    """Return a session that keeps every step in ``directory``, or ``max_to_keep`` of them."""
    options = ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=max_to_keep)
    return OrbaxSession(
        "Orbax",
        ocp.CheckpointManager(directory, options=options),
        ocp.args.StandardSave,
        ocp.args.StandardRestore(abstract_state),
        state_of=lambda state: state,
    )


def open_session(site: Site) -> OrbaxSession:
    return plain_session(site.persistent_dir, site.abstract_state)
