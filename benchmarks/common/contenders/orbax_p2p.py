"""Orbax's p2p checkpoint manager: a local copy on every host, lost ones fetched over TCP."""

import orbax.checkpoint as ocp
from absl import flags
from orbax.checkpoint.experimental.emergency.p2p import args as p2p_args
from orbax.checkpoint.experimental.emergency.p2p import checkpoint_manager as p2p
from orbax.checkpoint.experimental.emergency.p2p import options as p2p_options

from benchmarks.common.contenders import RAM, STORAGE, CannotRestore, PyTree, Site

_NEVER = 10**9  # steps


def prepare() -> None:
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmark"])


class _Session:
    def __init__(self, site: Site) -> None:
        self._abstract_state = site.abstract_state
        # A persistent directory only where it is compared: with one, each save and restore takes
        # another round of agreement.
        self._manager = p2p.CheckpointManager(
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

    def start_fresh(self) -> None:
        if (latest := self._manager.latest_step()) is not None:
            raise RuntimeError(f"Orbax's p2p manager offers step {latest} of an empty ramdisk")

    def save(self, step: int, state: PyTree) -> None:
        args = p2p_args.Composite(state=ocp.args.PyTreeSave(state))
        if not self._manager.save(step, args=args):
            raise RuntimeError(f"Orbax's p2p manager declined to save step {step}")

    def wait(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def restore(self, step: int) -> PyTree:
        latest = self._manager.latest_step()
        if latest != step:
            raise CannotRestore(f"offers step {latest}, not {step}")
        args = p2p_args.Composite(state=ocp.args.PyTreeRestore(item=self._abstract_state))
        return self._manager.restore(latest, args=args).state

    def close(self) -> None:
        self._manager.close()


def open_session(site: Site) -> _Session:
    return _Session(site)
