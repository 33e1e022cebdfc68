"""``EmergencyCheckpointer``: save, restore, and the wiring of everything below."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import jax

from emergency_ckpt.config import Config
from emergency_ckpt.errors import CheckpointError, PersistentTierError
from emergency_ckpt.runtime.events import EventSink
from emergency_ckpt.runtime.local_saves import LocalSaves
from emergency_ckpt.runtime.membership import Membership
from emergency_ckpt.runtime.persistent_saves import PersistentSaves
from emergency_ckpt.runtime.preemption import PreemptionWatch, find_notices
from emergency_ckpt.runtime.preservation import Preservation
from emergency_ckpt.runtime.restore_runner import Restore, RestoreParts
from emergency_ckpt.runtime.restore_types import RestoreReport
from emergency_ckpt.runtime.save_recipe import build_recipe
from emergency_ckpt.runtime.saver import Saver, SaverParts
from emergency_ckpt.runtime.topology import topology_of
from emergency_ckpt.runtime.vote import Vote
from emergency_ckpt.runtime.worker import Failures
from emergency_ckpt.tiers.local import LocalTier
from emergency_ckpt.tiers.persistent import PersistentTier
from emergency_ckpt.tiers.removal import StepShelf
from emergency_ckpt.tiers.state_tree import PyTree, describe

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
        self._member = member = Membership(config, self._run_id, self._process, slice_index)
        notices = find_notices() if config.heeds_preemption else None
        self._watch = PreemptionWatch(
            member.coordinator, notices, grace_s=config.preemption_grace_s
        )
        try:
            self._watch.agree_numbers("notices", config.start_timeout_s)
            self._persistent = self._open_persistent()
            self._wire(member.tier)
        except BaseException:
            self._watch.close()
            member.leave()
            raise

    def _open_persistent(self) -> PersistentTier | None:
        if self._config.dir is None:
            return None
        tier = PersistentTier(
            self._config.dir,
            timeout_s=self._config.persistent_timeout_s,
            buffer_bytes=self._config.storage_buffer_bytes,
        )
        timeout_s = self._config.start_timeout_s
        if self._process[0] == 0:
            try:
                tier.create(time.monotonic() + timeout_s / 4)
            except PersistentTierError as error:
                # Storage may be down just when the RAM is needed: saves try again.
                self._events.emit("persistent.unreachable", reason=str(error))
                self._failures.record(error)
        # Together, or the others' time for a restore would run while this one waits for storage.
        self._member.coordinator.barrier("persistent_opened", timeout_s)
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
            preservation=config.local_preservation_policy,
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
            allow_missing_host_state=config.allow_missing_host_state,
            host_state_limit_bytes=config.host_state_limit_bytes,
            timeout_s=config.restore_timeout_s,
        )
        self._preservation = None
        if self._persistent is not None:
            self._preservation = Preservation(
                StepShelf(self._persistent),
                self._events,
                self._failures,
                policy=config.preservation_policy,
                keep_last_n=config.keep_last_n,
                keep_every_n_steps=config.keep_every_n_steps,
            )
        self._saver = Saver(
            SaverParts(
                settings=config,
                process=self._process,
                run_id=self._run_id,
                coordinator=member.coordinator,
                tier=tier,
                local=self._local_saves,
                persistent=self._persistent_saves,
                preservation=self._preservation,
                watch=self._watch,
                events=self._events,
                failures=self._failures,
            ),
            config.save_plans(),
            member.incarnation,
        )
        self._restores = 0
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
        metrics: Mapping[str, Any] | None = None,
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
          force: save in every tier that is on, whatever the policy.
          metrics: JSON values, kept with a persistent step for preservation policies (``BestN``).

        Raises:
          InvalidState: a leaf that cannot be saved. HostStateError: likewise.
          RamdiskFull: at the first save, when ``restore`` was not called before.
          SystemExit: with ``exit_on_preemption``, at the sync point.
          CheckpointError: after ``stop``.
          Errors of the background part are logged, counted, and raised by ``check_for_errors``.
        """
        self._check_running("save")
        return self._saver.save(step, state, host_state, force=force, metrics=metrics)

    def _check_running(self, operation: str) -> None:
        if self._stopped:
            hint = "build another one; it finds what this one saved"
            raise CheckpointError(operation, "state", "the checkpointer was stopped", hint=hint)

    def reached_preemption(self, step: int) -> bool:
        """Whether the job is being preempted and ``step`` is where all processes act on it.

        True on every process from the same step on, which is the first that none of them had
        begun when the notice came; ``save`` has saved it in both tiers, or will. The loop then
        calls ``wait_until_finished`` and ends. Call it after every step, or not at all; it waits
        for nobody, but for a moment after a notice.
        """
        return self._saver.reached_preemption(step)

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
        self._saver.begin_restore()
        restored = None
        try:
            with self._preservation.held() if self._preservation else contextlib.nullcontext():
                found = restore.run()
            self._saver.reserve_together(
                recipe, f"restore/{number}/reserved", in_background=found is not None
            )
            self._watch.agree_numbers(f"restore/{number}/notices", self._config.restore_timeout_s)
            restored = found
        except BaseException:
            restore.undo()
            raise
        finally:
            self._saver.end_restore(restored)
        if restored is None:
            return None, state
        self._local_saves.restart_from(restored.save)
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
        known = set[int]()
        if self._persistent is not None:
            known.update(found.step for found in self._persistent.steps())
            known.update(self._persistent.whole_steps())  # the older ones too
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
          DeadlineExceeded: that takes longer than ``timeout_s`` (default: the longest a save may),
            or than the grace period after a preemption notice.
        """
        self._saver.wait_until_finished(timeout_s)

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
            self._saver.stop()
        finally:
            self._watch.close()
            self._member.leave()

    def _at_exit(self) -> None:
        """The program ends without ``stop``: let what is under way end, if that is soon."""
        self._stopped = True
        self._saver.end_threads(_EXIT_TIMEOUT_S)
        self._watch.close()
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
