"""The checkpointers of the study behind the same interface. All calls are collective."""

import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from benchmarks.common import state as model
from benchmarks.continuous.study import Orders
from emergency_ckpt import EmergencyCheckpointer, Event
from emergency_ckpt.tools.job_environment import JobEnvironment

PyTree = Any
_WHOLE = ("save.complete", "persistent.complete")
_LOST = ("save.incomplete", "save.failed", "persistent.failed")
_KEPT = 2


class Watch:
    """Times at which each step's save was called and was complete, on the monotonic clock."""

    def __init__(self) -> None:
        self.called_s: dict[int, float] = {}
        self.whole_s: dict[int, float] = {}
        self.lost: list[str] = []

    def whole(self, step: int) -> None:
        """Record that the save is complete now, in the first tier that reports it."""
        self.whole_s.setdefault(step, time.monotonic())


def _policy(orders: Orders) -> Any:
    return ocp.checkpoint_managers.ContinuousCheckpointingPolicy(
        minimum_interval_secs=orders.minimum_interval_s
    )


class Ours:
    """This project's checkpointer, with the tiers and the policy of the variant."""

    def __init__(
        self,
        orders: Orders,
        environment: JobEnvironment,
        mesh: jax.sharding.Mesh,
        abstract: PyTree,
        watch: Watch,
    ) -> None:
        self._abstract, self._watch = abstract, watch
        config = EmergencyCheckpointer.default_config().set(
            dir=orders.persistent_dir,
            local_dir=str(environment.local_dir),
            mesh=mesh,
            replica_axis=model.REPLICA_AXIS,
            keep_last_n=_KEPT,
            on_event=self._note,
            **orders.settings(_policy(orders)),
        )
        self._checkpointer = config.instantiate()
        # Finds nothing, and tells the checkpointer how large the state is.
        self._checkpointer.restore(state=abstract)

    def _note(self, event: Event) -> None:
        if event.name in _WHOLE:
            self._watch.whole(int(str(event.fields["step"])))
        elif event.name in _LOST:
            self._watch.lost.append(f"{event.name} {dict(event.fields)}")

    def save(self, step: int, state: PyTree) -> None:
        self._checkpointer.save(step=step, state=state)

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()
        self._checkpointer.check_for_errors()

    def restore(self) -> tuple[int | None, PyTree]:
        """Return the newest step and its state; None as the step when there is none."""
        return self._checkpointer.restore(state=self._abstract)

    def close(self) -> None:
        self._checkpointer.stop()


class PlainOrbax:
    """Orbax's own manager with its continuous policy. It saves to storage, having no RAM tier."""

    def __init__(
        self,
        orders: Orders,
        environment: JobEnvironment,
        mesh: jax.sharding.Mesh,
        abstract: PyTree,
        watch: Watch,
    ) -> None:
        del environment, mesh
        self._abstract, self._watch = abstract, watch
        self._directory = Path(orders.persistent_dir)
        self._under_way: int | None = None
        self._manager = ocp.CheckpointManager(
            orders.persistent_dir,
            options=ocp.CheckpointManagerOptions(
                save_decision_policy=_policy(orders), max_to_keep=_KEPT
            ),
        )

    def save(self, step: int, state: PyTree) -> None:
        # To ask the manager would be a collective, which training without us does not pay for. So
        # when a save became whole is known to a step only.
        if self._under_way is not None and self._is_whole(self._under_way):
            self._end()
        if self._manager.save(step, args=ocp.args.StandardSave(state)):
            if self._under_way is not None:  # it was waited for inside
                self._end()
            self._under_way = step

    def _is_whole(self, step: int) -> bool:
        return (self._directory / str(step)).exists()  # by a rename

    def _end(self) -> None:
        assert self._under_way is not None, "else there is no save to end"
        self._watch.whole(self._under_way)
        self._under_way = None

    def wait(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        if self._under_way is not None:
            self._end()

    def restore(self) -> tuple[int | None, PyTree]:
        """Return the newest step and its state; None as the step when there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None, self._abstract
        args = ocp.args.StandardRestore(self._abstract)
        return step, self._manager.restore(step, args=args)

    def close(self) -> None:
        self._manager.close()
