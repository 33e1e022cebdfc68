"""Orbax's emergency checkpoint manager: local copies on slices 1 to n-1, restored by broadcast."""

import orbax.checkpoint as ocp
from absl import flags
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

from benchmarks.common.contenders import BOTH, STORAGE, Site
from benchmarks.common.contenders.orbax_base import OrbaxSession


def prepare() -> None:
    # Its restore reads absl flags, which only absl's own main function parses.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmark"])
    ocp.multihost.initialize_runtime_to_distributed_ids()
    ocp.multihost.initialize_distributed_to_device_ids()


def open_session(site: Site) -> OrbaxSession:
    manager = emergency.CheckpointManager(
        site.local_dir,
        site.persistent_dir,
        global_mesh=site.mesh,
        abstract_state=site.abstract_state,
        options=emergency.CheckpointManagerOptions(
            # Intervals alone would not do: the first save is always persistent as well.
            local=emergency.LocalCheckpointOptions(
                should_save_fn=lambda step, latest: site.tier != STORAGE, max_to_keep=1
            ),
            persistent=emergency.PersistentCheckpointOptions(
                should_save_fn=lambda step, latest: (
                    site.tier == STORAGE or (site.tier == BOTH and step % site.stored_every == 0)
                )
            ),
            replica_axis_index=site.replica_axis,
        ),
    )
    return OrbaxSession(
        "Orbax's emergency manager",
        manager,
        lambda state: ocp.args.Composite(state=ocp.args.PyTreeSave(state)),
    )
