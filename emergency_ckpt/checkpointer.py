"""``EmergencyCheckpointer``: save, restore, and what a trainer asks in between."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
from absl import logging

from emergency_ckpt.assembly import agreed_config
from emergency_ckpt.cluster.preemption.signals import second_signal_ends
from emergency_ckpt.cluster.preemption.watch import is_good_end
from emergency_ckpt.config import Config
from emergency_ckpt.core.save.save_rules import step_number, wanted_step
from emergency_ckpt.core.save.step_agreement import TierName
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.forked import drop_in_child
from emergency_ckpt.opening import open_together, text_of
from emergency_ckpt.restore.protocol import RestoreReport, WholeSteps
from emergency_ckpt.restore.steps import StepCatalog
from emergency_ckpt.resume import Resume
from emergency_ckpt.start.config_warnings import check_joined
from emergency_ckpt.state.tree import PyTree

_EXIT_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 30.0
_STOPPED = "its checkpointer was stopped"
_ENDED = "its program ended"


class EmergencyCheckpointer:
    """Keeps the training state in two tiers and brings back the newest whole step.

    Build it from a config (``EmergencyCheckpointer.default_config().set(...).instantiate()``) or
    from keywords (``EmergencyCheckpointer(dir=..., local_dir=...)``); ``config.Config`` lists the
    settings. Construction, ``prefetch``, ``restore`` and ``stop`` must be called by all processes
    of the job, in the same order; ``save`` must be called by all at the same steps. After
    ``jax.distributed.initialize``, from one thread.

    Raises:
      ConfigError: invalid settings, or settings that differ between processes.
      LocalTierError: the ramdisk cannot be used.
      AuthenticationFailed: a peer does not have the same secret.
      DirectoryInUse: another run saves in ``dir``; on all processes.
      PersistentTierError: with ``require_storage``, saves could not use ``dir``.
      RestoreFailed: one of these, on another process.
    """

    def __init__(self, config: Config | None = None, **settings: Any) -> None:
        check_joined(jax.process_count())
        self._config, start = agreed_config(config or Config(), settings)
        self._process = (jax.process_index(), jax.process_count())
        self._opened = opened = open_together(self._config, start, self._process)
        self._departures, self._failures = opened.departures, opened.failures
        parts = opened.parts
        self._prefetches = parts.prefetches
        self._saver, self._steps = parts.saver, parts.steps
        self._resume = Resume(
            parts, self._config, self._process, opened.member.coordinator, opened.watch
        )
        self._stopped, self._why_stopped = False, "the checkpointer was stopped"
        self.last_restore: RestoreReport | None = None
        atexit.register(self._at_exit)
        drop_in_child(self, EmergencyCheckpointer._forget)

    @classmethod
    def default_config(cls) -> CheckpointerConfig:
        """Return a config to fill in with ``set`` and build with ``instantiate``."""
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
          state: pytree of arrays (jax, numpy, PRNG keys) and Python numbers, complex ones too.
          host_state: anything with ``get_state``/``set_state``, or dicts, lists, numbers, strings
            and bytes, or a nesting of these; this process's own.
          force: save in every tier that is on, whatever the policy.
          metrics: JSON values, numbers of numpy and JAX too, kept with a persistent step for
            preservation policies (``BestN``).

        Raises:
          InvalidState: a leaf that cannot be saved, a step that is no whole number from 0 on,
            metrics that are not JSON values. HostStateError: as for a leaf.
          RamdiskFull: at the first save, when ``restore`` was not called before.
          SystemExit: with ``exit_on_preemption``, at the sync point.
          CheckpointError: after ``stop``.
          Errors of the background part are logged, counted, and raised by ``check_for_errors``.
        """
        self._check_running("save")
        step = step_number("save", step)
        return self._saver.save(step, state, host_state, force=force, metrics=metrics)

    @property
    def heeds_preemption(self) -> bool:
        """True when ``reached_preemption`` will ever say so."""
        return self._config.heeds_preemption

    @property
    def takes_every_step(self) -> bool:
        """True when ``save`` is to be called at steps without a save too (``save_on_stop``)."""
        return self._config.save_on_stop

    def should_save(self, step: int) -> bool:
        """Return whether ``save`` at ``step`` starts a save. For the step that comes next; not
        collective.

        Raises what a policy raises; CheckpointError after ``stop``.
        """
        self._check_running("ask about")
        return self._saver.should_save(step_number("ask about", step))

    def _check_running(self, operation: str) -> None:
        if self._stopped:
            hint = "build another one; it finds what this one saved"
            raise CheckpointError(operation, "state", self._why_stopped, hint=hint)

    def reached_preemption(self, step: int) -> bool:
        """Return whether the job is being preempted and ``step`` is where all processes act on it.

        True on every process from the same step on, which is the first that none of them had
        begun when the notice came; ``save`` has saved it in both tiers, or will. The loop then
        calls ``wait_until_finished`` and ends. Call it after every step, or not at all; it waits
        for nobody, but for a moment after a notice.
        """
        return self._saver.reached_preemption(step)

    def prefetch(
        self,
        abstract_state: PyTree,
        *,
        step: int | Literal["latest"] | None = None,
        wants_host_state: bool = True,
    ) -> None:
        """Begin a restore in the background; ``restore`` then finds the bytes on the devices.

        To be called before the train step is compiled. Collective, and returns at once. A later
        ``restore`` that asks for the same uses it, when all processes have it; any other one, and
        one after a save that came first, restores as if there had been no prefetch. What goes
        wrong here is raised by the next ``restore``, on all processes; the one after tries anew.
        It has ``restore_timeout_s`` to itself. The devices hold the state from then on, and what
        was fetched lies in RAM as after a restore: a crash leaves no less than there was.

        Args:
          abstract_state: as ``state`` of ``restore``, with equal shapes, dtypes and shardings.
          step: as for ``restore``.
          wants_host_state: whether ``restore`` will be given a ``host_state``. It is applied there.

        Raises:
          InvalidState: as ``restore``. CheckpointError: after ``stop``, or when a prefetch waits
          for its ``restore`` already.
        """
        self._check_running("prefetch")
        number = wanted_step("prefetch", step)
        self._resume.prefetch(abstract_state, number, wants_host_state=wants_host_state)

    def restore(
        self,
        step: int | Literal["latest"] | None = None,
        *,
        state: PyTree,
        host_state: object = None,
        keep_newer: bool = False,
    ) -> tuple[int | None, PyTree]:
        """Bring back the newest whole step, or just ``step``. Collective; blocks.

        Args:
          step: restore this step or fail; None and "latest" take the newest that is whole.
          state: the state to restore into: arrays, or specs with shape, dtype and sharding. It is
            not changed; host values (numpy, numbers) give the types of what is returned. A Python
            bool, int, float or complex takes any stored scalar of its kind: a step that was 0 at
            first is an int32 array after the first compiled step.
          host_state: as given to ``save``; objects with ``set_state`` are repositioned in place,
            dicts and lists updated in place. ``last_restore.host_state`` has the restored value.
          keep_newer: newer steps in RAM are forgotten at the next save, not yet; until then they
            can still be restored.

        Returns:
          (step, restored state), bit for bit as saved; (None, ``state``) when there is nothing.

        Raises the same kind of error on all processes, having changed nothing:
          InvalidState: ``step`` is no step, or ``state`` no state.
          StateMismatch: leaves, shapes or dtypes differ. StepNotFound: no such whole step.
          HostStateError: saved by another number of processes. Unrecoverable: more is lost than
          the copies allow. RestoreFailed, DeadlineExceeded: a process failed or did not come.
          RamdiskFull: no room for the saves to come; what was newer in RAM is forgotten then.
        """
        self._check_running("restore")
        wanted = wanted_step("restore", step)
        self.wait_until_finished()
        restore = self._resume.restore(state, host_state, wanted, keep_newer=keep_newer)
        if restore.restored is None:
            return None, state
        self.last_restore = restore.report
        return restore.restored.step, restore.restored.state

    def latest_step(self) -> int | None:
        """Return the newest step that this process knows to be whole in some tier; None if there is
        none.

        Not collective; reads the persistent directory, for half a minute at most: where it does not
        answer, RAM alone is asked, with a warning. A save under way does not count. What is whole
        after a loss, only a restore can tell.

        Raises:
          PersistentTierError: storage does not answer, and this process's RAM has nothing.
        """
        steps = self.all_steps()
        return steps[-1] if steps else None

    def all_steps(self) -> list[int]:
        """Steps known to be whole, oldest first: in RAM the newest one. As ``latest_step``."""
        return self._steps.known()

    @property
    def newest_saved_step(self) -> int | None:
        """The newest step saved whole since the start, or restored; None before. Asks nobody."""
        return self._saver.saved.newest()

    @property
    def steps(self) -> StepCatalog:
        """What steps there are over all processes, what is in one, and its removal."""
        return self._steps

    def go_on_after(self, steps: WholeSteps) -> None:
        """Take these for saved, as after a restore of each tier's newest, without a restore."""
        found: dict[TierName, tuple[int, ...]] = {
            "local": steps.local,
            "persistent": steps.persistent,
        }
        self._saver.go_on_after({name: every[-1] for name, every in found.items() if every})

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

    def stop(self, timeout_s: float | None = None, *, after_error: bool = False) -> None:
        """Finish the saves under way and let go of ramdisk, port and threads. Idempotent.

        The bytes stay: the next start of the run finds them. Collective in effect: a process that
        stops no longer serves its shards. Blocks for the saves at most ``timeout_s`` (default: the
        longest that they may take); DeadlineExceeded then, and all is let go of nevertheless.
        With ``save_on_stop`` the last step is saved first, which may take as long again; not
        ``after_error``, when the other processes may be at another step.
        """
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self._at_exit)
        with contextlib.ExitStack() as ends:  # from the last to the first, whatever fails
            ends.callback(self._opened.release, _STOPPED)
            ends.callback(self._saver.stop, timeout_s)
            ends.callback(self._prefetches.end, _STOP_TIMEOUT_S)
            ends.callback(lambda: self._departures.leave(_STOPPED, self._saver.begun))
            if not after_error:
                self._saver.save_last(timeout_s)

    def _leave_after(self, error: BaseException) -> None:
        """Training ended by ``error``: tell the others at once, then wait only a short time."""
        self._departures.leave(text_of(error), self._saver.begun)
        self._stopped, limit_s = True, self._config.exit_timeout_s
        atexit.unregister(self._at_exit)
        try:
            with second_signal_ends():
                text = "training ended by %s; saves under way have %g s to end"
                logging.error(text, text_of(error), limit_s)
                self._prefetches.end(min(limit_s, _EXIT_TIMEOUT_S))
                self._saver.abandon(limit_s)
        finally:
            self._opened.release(text_of(error))

    def _forget(self) -> None:
        """In a forked child: threads, locks and the exit's work are the parent's."""
        self._stopped, self._why_stopped = True, "the checkpointer is the parent process's"
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """No ``stop`` came: a thread inside native code at the interpreter's end would abort it."""
        self._stopped = True
        self._departures.leave(_ENDED, self._saver.begun)
        self._prefetches.end(_EXIT_TIMEOUT_S)
        self._saver.end_threads(_EXIT_TIMEOUT_S)
        self._opened.release(_ENDED)

    def __enter__(self) -> EmergencyCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if is_good_end(error):
            self.stop()
        elif error is not None and not self._stopped:
            self._leave_after(error)


class CheckpointerConfig(Config):
    """``Config`` with ``instantiate``."""

    def set(self, **settings: Any) -> CheckpointerConfig:
        """As ``Config.set``."""
        super().set(**settings)
        return self

    def instantiate(self) -> EmergencyCheckpointer:
        """Build the checkpointer. Collective; the config may be used again."""
        return EmergencyCheckpointer(self)
