"""``EmergencyCheckpointer``: save, restore, and the wiring of everything below."""

from __future__ import annotations

import atexit
from typing import Any

import jax

from emergency_ckpt.config import Config
from emergency_ckpt.core.persistence import writers
from emergency_ckpt.core.save_decision import decide_save
from emergency_ckpt.errors import (
    CheckpointError,
    DeadlineExceeded,
    PersistentTierError,
    RestoreFailed,
    SaveFailed,
)
from emergency_ckpt.runtime.coordination import do_together
from emergency_ckpt.runtime.events import EventSink
from emergency_ckpt.runtime.local_saves import LocalSave, LocalSaves
from emergency_ckpt.runtime.membership import Membership
from emergency_ckpt.runtime.persistent_saves import PersistentSave, PersistentSaves
from emergency_ckpt.runtime.restore_runner import Restore, RestoreParts
from emergency_ckpt.runtime.restore_types import RestoreReport
from emergency_ckpt.runtime.save_recipe import SaveRecipe, build_recipe
from emergency_ckpt.runtime.topology import topology_of
from emergency_ckpt.runtime.vote import Vote
from emergency_ckpt.runtime.worker import BackgroundWorker, Failures
from emergency_ckpt.tiers import host_state as host_states
from emergency_ckpt.tiers.local import LocalTier
from emergency_ckpt.tiers.persistent import PersistentTier
from emergency_ckpt.tiers.state_tree import PyTree, describe
from emergency_ckpt.types import SaveId

_STOP_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 10.0


class EmergencyCheckpointer:
    """Keeps the training state in two tiers and brings back the newest whole step.

    Build it from a config (``EmergencyCheckpointer.default_config().set(...).instantiate()``) or
    from keywords (``EmergencyCheckpointer(dir=..., local_dir=...)``); ``config.Config`` lists the
    settings. Construction, ``restore`` and ``stop`` must be called by all processes of the job,
    in the same order; ``save`` must be called by all at the same steps. After
    ``jax.distributed.initialize``, from one thread.

    Raises:
      ConfigError: invalid settings, or settings that differ between processes.
      LocalTierError: the ramdisk cannot be used.
    """

    def __init__(self, config: Config | None = None, **settings: Any) -> None:
        self._config = config = (config or Config()).set(**settings).validated()
        assert config.run_id is not None
        self._run_id = config.run_id
        self._process = (jax.process_index(), jax.process_count())
        self._events = EventSink(config.on_event, process_index=self._process[0])
        self._failures = Failures()
        slices = topology_of(config.mesh, config.replica_axis, describe((), "start"))
        slice_index = slices.slice_of[self._process[0]]
        self._member = Membership(config, self._run_id, self._process, slice_index)
        self._incarnation = self._member.incarnation
        self._persistent = self._open_persistent()
        self._wire(self._member.tier)

    def _open_persistent(self) -> PersistentTier | None:
        if self._config.dir is None:
            return None
        tier = PersistentTier(self._config.dir, keep_last_n=self._config.keep_last_n)
        if self._process[0] == 0:
            try:
                tier.create()
            except PersistentTierError as error:
                # Storage may be down just when the RAM is needed: saves try again.
                self._events.emit("persistent.unreachable", reason=str(error))
                self._failures.record(error)
        return tier

    def _wire(self, tier: LocalTier) -> None:
        config, member = self._config, self._member
        vote = Vote(member.coordinator, config.save_timeout_s)
        self._local_saves = LocalSaves(
            tier,
            vote,
            member.peers,
            self._events,
            self._failures,
            process=self._process,
            host_state_limit_bytes=config.host_state_limit_bytes,
            copy_batch_bytes=config.copy_batch_bytes,
        )
        self._persistent_saves = None
        if self._persistent is not None:
            self._persistent_saves = PersistentSaves(
                self._persistent,
                member.coordinator,
                member.peers,
                member.holdings.inbox,
                self._events,
                self._failures,
                host_state_limit_bytes=config.host_state_limit_bytes,
                timeout_s=config.persistent_timeout_s,
            )
        self._restore_parts = RestoreParts(
            coordinator=member.coordinator,
            tier=tier,
            holdings=member.holdings,
            client=member.client,
            peers=member.peers,
            persistent=self._persistent,
            events=self._events,
            run_id=self._run_id,
            remap=config.host_state_remap,
            extra_holders=config.extra_holders,
            timeout_s=config.restore_timeout_s,
        )
        self._local_worker = BackgroundWorker("eckpt-local-saves", self._failures)
        self._persistent_worker = BackgroundWorker("eckpt-persistent-saves", self._failures)
        self._recipe: SaveRecipe | None = None
        self._restores = 0
        self._last_local: int | None = None
        self._last_persistent: int | None = None
        self._stopped = False
        self.last_restore: RestoreReport | None = None
        # A thread that the interpreter's end meets inside native code aborts the process.
        atexit.register(self._at_exit)

    @classmethod
    def default_config(cls) -> CheckpointerConfig:
        """A config to fill in with ``set`` and build with ``instantiate``."""
        return CheckpointerConfig()

    def save(
        self,
        *,
        step: int,
        state: PyTree,
        host_state: object = None,
        force: bool = False,
    ) -> bool:
        """Save ``state`` and ``host_state`` if a save is due at ``step``; True if one was started.

        To be called after every step by all processes; not collective: it never waits for a peer,
        and does nothing at all when no save is due. Blocks for the device-to-host transfer, and
        before that for the end of the previous save of the same tier, at most ``save_timeout_s``.
        When it returns, the state may be donated and the iterator may move on. Until the save is
        complete everywhere, the one before it survives any crash.

        Args:
          state: pytree of arrays (jax, numpy, PRNG keys) and Python numbers.
          host_state: anything with ``get_state``/``set_state``, or dicts, lists, numbers, strings
            and bytes, or a nesting of these; this process's own.
          force: save in every tier that is on, whatever the interval.

        Raises:
          InvalidState: a leaf that cannot be saved. HostStateError: likewise.
          RamdiskFull: at the first save, when ``restore`` was not called before.
          CheckpointError: after ``stop``.
          Errors of the background part are logged, counted, and raised by ``check_for_errors``.
        """
        self._check_running("save")
        local = self._is_due(step, self._config.local_save_every_n_steps, self._last_local, force)
        persistent = self._persistent_saves is not None and self._is_due(
            step, self._config.save_every_n_steps, self._last_persistent, force
        )
        if not (local or persistent):
            return False
        started = False
        if local and self._wait_for_turn(self._local_worker, "local", step):
            self._last_local = step
            self._start_local(step, state, host_state)
            started = True
        if persistent and self._wait_for_turn(self._persistent_worker, "persistent", step):
            self._last_persistent = step
            self._start_persistent(step, state, host_state)
            started = True
        return started

    def _check_running(self, operation: str) -> None:
        if self._stopped:
            hint = "build another one; it finds what this one saved"
            raise CheckpointError(operation, "state", "the checkpointer was stopped", hint=hint)

    @staticmethod
    def _is_due(step: int, every_n_steps: int, last: int | None, force: bool) -> bool:
        if force and every_n_steps > 0:
            return last is None or step > last
        return decide_save(step, every_n_steps, last).save

    def _wait_for_turn(self, worker: BackgroundWorker, tier: str, step: int) -> bool:
        if worker.wait_idle(self._config.save_timeout_s):
            return True
        self._failures.record(
            SaveFailed(
                "save",
                f"step {step} to the {tier} tier",
                f"the save before it has not ended within {self._config.save_timeout_s:g} s",
                hint="save less often, or look at why the tier is slow",
            )
        )
        self._events.emit("save.skipped", step=step, tier=tier)
        return False

    def _start_local(self, step: int, state: PyTree, host_state: object) -> None:
        flat, recipe, save = self._prepare(step, state)
        job = LocalSave(
            save=save,
            leaves=recipe.leaves,
            layout=recipe.layout,
            views=recipe.local.take(flat),
            host_state=host_states.capture(host_state),
            buddies=recipe.buddies,
        )
        self._events.emit("save.started", step=step, tier="local")
        self._local_worker.submit(lambda: self._local_saves.run(job))

    def _start_persistent(self, step: int, state: PyTree, host_state: object) -> None:
        assert self._persistent_saves is not None
        flat, recipe, save = self._prepare(step, state)
        job = PersistentSave(
            save=save,
            tree=recipe.tree,
            views=dict(zip(recipe.held, recipe.all_held.take(flat), strict=True))
            if self._process[0] in writers(recipe.topology)
            else {},
            host_state=host_states.capture(host_state),
            topology=recipe.topology,
        )
        run = self._persistent_saves.run
        self._events.emit("save.started", step=step, tier="persistent")
        self._persistent_worker.submit(lambda: run(job))

    def _prepare(self, step: int, state: PyTree) -> tuple[list[Any], SaveRecipe, SaveId]:
        flat, treedef = jax.tree_util.tree_flatten(state)
        if self._recipe is None or not self._recipe.local.matches(flat, treedef):
            self._set_recipe(build_recipe(describe(state, "save"), self._config, self._process))
        assert self._recipe is not None
        save = SaveId(step=step, incarnation=self._incarnation, run_id=self._run_id)
        return flat, self._recipe, save

    def _set_recipe(self, recipe: SaveRecipe, *, in_background: bool = False) -> None:
        self._recipe = recipe
        if self._config.local_save_every_n_steps <= 0:
            return
        tier, size_bytes = self._member.tier, recipe.layout.size_bytes
        if in_background:  # training waits for nothing that the first save does not need yet
            tier.check_reservable(size_bytes)
            tier.prefault_in_background(size_bytes)
        else:
            tier.reserve(size_bytes)
            tier.prefault_in_background()

    def restore(
        self, step: int | None = None, *, state: PyTree, host_state: object = None
    ) -> tuple[int | None, PyTree]:
        """Bring back the newest whole step, or just ``step``. Collective; blocks.

        Args:
          step: restore this step or fail; None takes the newest that is whole.
          state: the state to restore into: arrays, or specs with shape, dtype and sharding. It is
            not changed; host values (numpy, numbers) give the types of what is returned.
          host_state: as given to ``save``; objects with ``set_state`` are repositioned in place,
            dicts and lists updated in place. ``last_restore.host_state`` has the restored value.

        Returns:
          (step, restored state), bit for bit as saved; (None, ``state``) when there is nothing.

        Raises the same kind of error on all processes, having changed nothing:
          StateMismatch: leaves, shapes or dtypes differ. StepNotFound: no such whole step.
          HostStateError: saved by another number of processes. Unrecoverable: more is lost than
          the copies allow. RestoreFailed, DeadlineExceeded: a process failed or did not come.
          RamdiskFull: no room for the saves to come; what was newer in RAM is forgotten then.
        """
        self._check_running("restore")
        self.wait_until_finished()
        tree = describe(state, "restore")
        recipe = build_recipe(tree, self._config, self._process)
        number, self._restores = self._restores, self._restores + 1
        restore = Restore(
            self._restore_parts,
            tree,
            state,
            requested_step=step,
            host_state=host_state,
            buddies=recipe.buddies,
            number=number,
        )
        restored = restore.run()
        try:
            # A ramdisk that is too small for the saves to come stops all.
            errors = do_together(
                self._member.coordinator,
                f"restore/{number}/reserved",
                lambda: self._set_recipe(recipe, in_background=restored is not None),
                self._config.restore_timeout_s,
            )
            if errors:
                raise RestoreFailed("reserve", "ramdisk", errors)
        except BaseException:
            restore.undo()
            raise
        if restored is None:
            return None, state
        self._incarnation = restored.incarnation
        self._local_saves.restart_from(restored.save)
        self._last_local = self._last_persistent = restored.report.step
        self.last_restore = restored.report
        return restored.report.step, restored.state

    def latest_step(self) -> int | None:
        """The newest step that this process knows to be whole in some tier; None if there is none.

        Not collective; reads the persistent directory. What is whole after a loss, only a restore
        can tell.
        """
        steps = self.all_steps()
        return steps[-1] if steps else None

    def all_steps(self) -> list[int]:
        """Steps known to be whole, oldest first. As ``latest_step``."""
        known = {p.step for p in self._persistent.steps()} if self._persistent else set[int]()
        complete = self._local_saves.last_complete
        if complete is None:
            tensors, _, complete = self._member.tier.held()
            if complete not in {held.save for held in tensors}:
                complete = None  # a restore went back behind it
        if complete is not None:
            known.add(complete.step)
        return sorted(known)

    @property
    def failed_saves(self) -> int:
        """Background saves that failed since the start."""
        return self._failures.count

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Return when no save of this process is under way. Blocks; not collective.

        Raises:
          DeadlineExceeded: that takes longer than ``timeout_s`` (default: the longest a save may).
        """
        config = self._config
        longest_s = 4 * config.save_timeout_s + 4 * config.persistent_timeout_s
        limit_s = longest_s if timeout_s is None else timeout_s
        for worker, tier in (
            (self._local_worker, "local"),
            (self._persistent_worker, "persistent"),
        ):
            if not worker.wait_idle(limit_s):
                raise DeadlineExceeded(
                    "wait for", f"the save to the {tier} tier", f"not done within {limit_s:g} s"
                )

    def check_for_errors(self) -> None:
        """Raise the newest background error that was not raised before, if any. Not collective."""
        self._failures.raise_pending()

    def stop(self) -> None:
        """Finish the saves under way and let go of ramdisk, port and threads. Idempotent.

        The bytes stay: the next start of the run finds them. Collective in effect: a process that
        stops no longer serves its shards.
        """
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self._at_exit)
        try:
            self.wait_until_finished()
        finally:
            self._local_worker.stop(_STOP_TIMEOUT_S)
            self._persistent_worker.stop(_STOP_TIMEOUT_S)
            self._member.leave()

    def _at_exit(self) -> None:
        """The program ends without ``stop``: let what is under way end, if that is soon."""
        self._stopped = True
        self._local_worker.stop(_EXIT_TIMEOUT_S)
        self._persistent_worker.stop(_EXIT_TIMEOUT_S)
        self._member.leave()

    def __enter__(self) -> EmergencyCheckpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class CheckpointerConfig(Config):
    """``Config`` with ``instantiate``."""

    def set(self, **settings: Any) -> CheckpointerConfig:
        """As ``Config.set``."""
        super().set(**settings)
        return self

    def instantiate(self) -> EmergencyCheckpointer:
        """Build the checkpointer. Collective; the config may be used again."""
        return EmergencyCheckpointer(self)
