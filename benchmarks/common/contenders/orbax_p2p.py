"""Orbax's p2p checkpoint manager: a local copy on every host; lost copies are fetched over TCP."""

import orbax.checkpoint as ocp
from absl import flags
from orbax.checkpoint.experimental.emergency.p2p import args as p2p_args
from orbax.checkpoint.experimental.emergency.p2p import checkpoint_manager as p2p
from orbax.checkpoint.experimental.emergency.p2p import options as p2p_options

from benchmarks.common.contenders import RAM, STORAGE, Site
from benchmarks.common.contenders.orbax_base import OrbaxSession

_NEVER = 10**9  # steps


def prepare() -> None:
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmark"])


def open_session(site: Site) -> OrbaxSession:
    # A persistent directory only where it is compared: with one, each save and restore takes
    # another round of agreement.
    manager = p2p.CheckpointManager(
        global_mesh=site.mesh,
        abstract_state=site.abstract_state,
        local_directory=site.local_dir,
        persistent_directory=site.persistent_dir if site.tier == STORAGE else None,
        options=p2p_options.CheckpointManagerOptions(
            local=p2p_options.LocalCheckpointOptions(
                save_interval_steps=1 if site.tier == RAM else _NEVER, max_to_keep=1
            ),
            persistent=p2p_options.PersistentCheckpointOptions(save_interval_steps=1),
            replica_axis_index=site.replica_axis,
        ),
    )
    return OrbaxSession(
        "Orbax's p2p manager",
        manager,
        lambda state: p2p_args.Composite(state=ocp.args.PyTreeSave(state)),
        p2p_args.Composite(state=ocp.args.PyTreeRestore(item=site.abstract_state)),
    )
