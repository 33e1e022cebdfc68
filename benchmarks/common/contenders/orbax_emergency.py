"""Orbax's emergency checkpoint manager: local copies on slices 1..n-1, restored by broadcast."""

import orbax.checkpoint as ocp
from absl import flags
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

from benchmarks.common.contenders import RAM, STORAGE, CannotRestore, PyTree, Site


def prepare() -> None:
    # Its restore reads absl flags, which only absl's own main function parses.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmark"])
    ocp.multihost.initialize_runtime_to_distributed_ids()
    ocp.multihost.initialize_distributed_to_device_ids()


class _Session:
    def __init__(self, site: Site) -> None:
        self._manager = emergency.CheckpointManager(
            site.local_dir,
            site.persistent_dir,
            global_mesh=site.mesh,
            abstract_state=site.abstract_state,
            options=emergency.CheckpointManagerOptions(
                # Intervals alone would not do: the first save is always persistent as well.
                local=emergency.LocalCheckpointOptions(
                    should_save_fn=lambda step, latest: site.tier == RAM, max_to_keep=1
                ),
                persistent=emergency.PersistentCheckpointOptions(
                    should_save_fn=lambda step, latest: site.tier == STORAGE
                ),
                replica_axis_index=site.replica_axis,
            ),
        )

    def start_fresh(self) -> None:
        if (latest := self._manager.latest_step()) is not None:
            raise RuntimeError(
                f"Orbax's emergency manager offers step {latest} of an empty ramdisk"
            )

    def save(self, step: int, state: PyTree) -> None:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
        if not self._manager.save(step, args=args):
            raise RuntimeError(f"Orbax's emergency manager declined to save step {step}")

    def wait(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def restore(self, step: int) -> PyTree:
        latest = self._manager.latest_step()
        if latest != step:
            raise CannotRestore(f"offers step {latest}, not {step}")
        return self._manager.restore(latest).state

    def close(self) -> None:
        self._manager.close()


def open_session(site: Site) -> _Session:
    return _Session(site)
