"""``EmergencyCheckpointer``: save, restore, and the queries of a training loop.

To read on: ``start`` opens a checkpointer. A save is ``save/saver.py``, whose head has its steps; a
restore is ``resume.py``, then ``restore/restore.py``; an end is ``save/ending.py``.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Unpack

import jax
from absl import logging

from emergency_ckpt.background import (
    Failures,
    FinalCalls,
    at_program_end,
    not_at_program_end,
)
from emergency_ckpt.cluster.peers import start_told
from emergency_ckpt.cluster.preemption import is_good_end, is_success, second_signal_ends
from emergency_ckpt.config import Config
from emergency_ckpt.core.save.save_rules import step_number
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.errors import CheckpointError, InvalidState, SaveFailed
from emergency_ckpt.forked import drop_in_child
from emergency_ckpt.restore.request import CompleteSteps, RestoreReport
from emergency_ckpt.restore.steps import StepCatalog
from emergency_ckpt.resume import Resume
from emergency_ckpt.start import Opened, agreed_config, check_joined, text_of
from emergency_ckpt.state.link import Link, find_link
from emergency_ckpt.state.tree import PyTree
from emergency_ckpt.types import OrbaxStep

if TYPE_CHECKING:
    from emergency_ckpt.config.keywords import Settings

_State = TypeVar("_State")
_STOPPED = "its checkpointer was stopped"
_ENDED = "its program ended"
_DROPPED = "nothing in its program refers to its checkpointer any more"
_REPLACED = "another checkpointer of its run took its place after a restore that failed"

_alive: weakref.WeakSet[EmergencyCheckpointer] = weakref.WeakSet()
_final_calls = FinalCalls()
"""The ends of dropped checkpointers."""


class _End:
    """The end of a checkpointer: it comes once, by ``stop``, by its program or when it is dropped.

    This object refers to no checkpointer, so one that nobody refers to any more is collected.

    Attributes:
      has_come: the end has begun.
      why: for who calls the checkpointer after its end.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._ending = threading.Lock()
        self.has_come, self.why = False, "the checkpointer was stopped"
        at_program_end(self._with_program)
        drop_in_child(self, _End.leave_to_parent)

    @contextlib.contextmanager
    def left_to_caller(self) -> Generator[None]:
        """Leave the end to the caller, inside; the end of the program waits for its thread."""
        self.has_come = True
        try:
            yield
        finally:
            not_at_program_end(self._with_program)

    def leave_to_parent(self) -> None:
        """Do nothing in a forked child: threads, locks and the end are the parent's."""
        self.has_come = True
        not_at_program_end(self._with_program)
        self.why = "the checkpointer belongs to the parent process"

    def come(self, why: str) -> None:
        """End the checkpointer once saves in progress are finished. It was not stopped."""
        self.why = why
        self._come(why, self._opened.config.longest_wait_s)
        not_at_program_end(self._with_program)

    def come_after(self, error: BaseException) -> None:
        """Tell the others at once that ``error`` ended training, and wait only a short time."""
        limit_s = self._opened.config.exit_timeout_s
        with second_signal_ends():
            text = "training ended by %s; saves in progress have %g s to finish"
            logging.error(text, text_of(error), limit_s)
            self._come(text_of(error), limit_s, error)
        not_at_program_end(self._with_program)

    def _with_program(self) -> None:
        """Stop at exit; a thread inside native code at the interpreter's end would abort it.

        Saves in progress have the time that they have in ``stop``, and after an error that ended
        the program the time that they have after one that leaves the ``with`` block.
        """
        config = self._opened.config
        error: BaseException | None = getattr(sys, "last_value", None)  # it has been printed
        with second_signal_ends():
            limit_s = config.longest_wait_s if error is None else config.exit_timeout_s
            self._come(_ENDED, limit_s, error)

    def _come(self, reason: str, limit_s: float, error: BaseException | None = None) -> None:
        opened = self._opened
        # The program's end waits for an end that has begun.
        if not self._ending.acquire(timeout=limit_s):
            return
        try:
            if self.has_come:
                return
            self.has_come = True
            try:
                opened.left_processes.leave(reason, opened.saver.begun)
                opened.expect_no_step()
                opened.saver.ending.abandon(limit_s)
            finally:
                opened.release(reason, error)
            _tell_lost_step(opened.failures, raises=False)
        finally:
            self._ending.release()


def _tell_lost_step(failures: Failures, *, raises: bool) -> None:
    """Raise the error of the last save to storage, if that failed, or log it."""
    lost = failures.take_lost()
    if lost is None:
        return
    step, failure = lost
    problem = f"the save of step {step} to storage failed: {failure.problem}"
    hint = "no later save has made it good; `eckpt ls` lists the steps that each tier has"
    failure_of_end = SaveFailed("end", "training", problem, hint=hint)
    if raises:
        raise failure_of_end from failure
    logging.error("%s", failure_of_end)


class EmergencyCheckpointer:
    """Keeps the training state in two tiers and restores the newest complete step.

    Build it from a config (``EmergencyCheckpointer.default_config().set(...).instantiate()``) or
    from keywords (``EmergencyCheckpointer(dir=..., local_dir=...)``); ``config.Config`` lists the
    settings. Construction, ``restore`` and ``stop`` must be called by all processes
    of the job, in the same order; ``save`` must be called by all at the same steps. After
    ``jax.distributed.initialize``, from one thread. One that nothing refers to any more ends by
    itself, without the last step of RAM in storage.

    Raises:
      ConfigError: invalid settings, or settings that differ between processes.
      LocalTierError: the ramdisk cannot be used.
      PeerUnreachable: with "peers" in ``require``, a peer did not answer.
      DirectoryInUse: another run saves in ``dir``; on all processes.
      PersistentTierError: with "storage" in ``require``, saves could not use ``dir``.
      RestoreFailed: one of these, on another process.
    """

    _buffers: ClassVar[Buffers] = Buffers()
    """No setting: tests and benchmarks have a class with others."""
    _link: ClassVar[Link | None] = None
    """That of this machine; tests have a class with a fake one."""
    _stores_newest: ClassVar[bool] = True
    """True where a good end brings RAM's newest step to storage. No setting: tests of what crashes
    leave have a class without."""

    def __init__(self, config: Config | None = None, **settings: Unpack[Settings]) -> None:
        check_joined(jax.process_count())
        self._config, start = agreed_config(config or Config(), settings)
        process = (jax.process_index(), jax.process_count())
        with start_told(start.coordinator):
            link = (self._link or find_link()).reading(self._config.device_reads)
            self._end_others()
        self._opened = opened = Opened(self._config, start, process, self._buffers, link)
        self._left_processes, self._failures = opened.left_processes, opened.failures
        self._saver, self._steps = opened.saver, opened.steps
        self._resume = Resume(opened)
        self._progress = opened.progress
        self.last_restore: RestoreReport | None = None
        self._restored_host_state = False
        self.makes_way = False
        """The newest restore failed: the next checkpointer of the run in this process ends this
        one, which a variable or the error's traceback may still refer to."""
        self._end = end = _End(opened)
        weakref.finalize(self, _final_calls.put, partial(end.come, _DROPPED)).atexit = False
        _alive.add(self)

    def _end_others(self) -> None:
        """End the others of this process that make way, and wait for those that were dropped."""
        _final_calls.start()
        if self._replace_others():
            gc.collect()  # what only its own parts refer to has been dropped as well
        _final_calls.wait(self._config.start_timeout_s / 2)

    def _replace_others(self) -> bool:
        """End the others that make way; return whether there are any others.

        The caller must not refer to the others: those that are dropped are collected next.
        """
        config = self._config
        place = (config.run_name, config.local_dir)
        others = [] if config.only_reads else [e for e in _alive if not e._end.has_come]
        for other in others:
            theirs = other._config
            is_here = (theirs.run_name, theirs.local_dir) == place
            if other.makes_way and is_here and not theirs.only_reads:
                logging.warning("run %r: %s", config.run_name, _REPLACED)
                other._end.come(_REPLACED)
        return bool(others)

    @classmethod
    def default_config(cls) -> CheckpointerConfig:
        """Return a config; fill it in with ``set`` and build with ``instantiate``."""
        return CheckpointerConfig()

    def save(
        self,
        *,
        step: int,
        state: PyTree,
        host_state: object = None,
        force: bool = False,
        metrics: Mapping[str, Any] | None = None,
        orbax: OrbaxStep | None = None,
    ) -> bool:
        """Save ``state`` and ``host_state`` if due at ``step``; return True if a save was started.

        To be called after every step by all processes. Not collective: it waits for no peer, and
        does nothing when no save is due. Blocks for the end of the previous save to RAM, at most
        twice ``stall_timeout_s``, and for the device-to-host transfer; after that the save to RAM
        is skipped on all processes, with a warning. It does not wait for storage: a save to it that
        is due while the previous one is under way is skipped, with the event ``save.skipped`` and
        an error of the background part. ``force`` and a preemption wait for the previous save to
        storage as well, at most twice ``stall_timeout_s`` and the grace period; every save does so
        without ``async_save``. When it returns, the state may be donated and the iterator may move
        on. Until the save is complete on all processes, the previous one survives any crash. Errors
        of the background part are logged, counted, and raised by ``check_for_errors``.

        Args:
          state: pytree of arrays (jax, numpy, PRNG keys) and Python numbers, also complex.
          host_state: this process's own: objects with ``get_state``/``set_state``, dicts, lists,
            numbers, strings and bytes, nested in any way.
          force: save in every tier that is on, independent of its policy; InvalidState at a step
            that is older than the newest one saved or restored. Without ``force`` such a step is
            not saved, with a warning.
          metrics: JSON values, also numbers of numpy and JAX, kept with a persistent step for
            preservation policies (``BestN``).
          orbax: what Orbax's readers find in storage besides the arrays, such as the names of its
            items; equal on all processes. None: one item, and the metrics.

        Raises:
          InvalidState: a leaf cannot be saved, the step is no whole number from 0 on, the metrics
            are not JSON values, or a signal handler calls this method inside of it.
          HostStateError: ``host_state`` cannot be saved.
          RamdiskFull: at the first save, when ``restore`` was not called before.
          SystemExit: with ``on_preemption="exit"``, at the sync point.
          PeerLeft: a process has died, so that the arrays of ``state`` will never be computed.
          PersistentTierError: on all, where the directory could not be read at the start and
            ``restore`` has restored nothing: the run may have steps there.
          CheckpointError: after ``stop``.
        """
        self._check_running("save")
        step = step_number("save", step)
        self._progress.note(step)
        with self._progress.inside("save", self._config.longest_capture_s):
            begun = self._saver.save(
                step, state, host_state, force=force, metrics=metrics, orbax=orbax
            )
        self.makes_way = self.makes_way and not begun
        if begun and host_state is None and self._restored_host_state:
            self._restored_host_state = False  # once is enough
            self._opened.events.emit("warning", cause="save_without_host_state", step=step)
        return begun

    def leave_out(self, *, step: int, problem: str, force: bool = False) -> None:
        """Take no part in the save to RAM that is due at ``step``, because of ``problem``.

        In place of ``save``, which raises an error about a state or a host state. The others learn
        of that at once, so that nobody waits for this process, and the step is whole on none.
        """
        self._check_running("leave out")
        step = step_number("leave out", step)
        error = InvalidState("save", f"step {step}", problem)
        self._progress.note(step)
        with contextlib.suppress(InvalidState):
            self._saver.save(step, None, None, force=force, problem=error)

    @property
    def heeds_preemption(self) -> bool:
        """True when ``reached_preemption`` can return True."""
        return self._config.heeds_preemption

    def should_save(self, step: int) -> bool:
        """Return whether ``save`` at ``step``, the next step, would start a save. Not collective.

        A loop may call ``save`` where this is True alone: the call names the loop's step, and warns
        of an older one, as ``save`` does.

        Raises the error of a policy; InvalidState for what is no step; CheckpointError after
        ``stop``.
        """
        self._check_running("ask about")
        step = step_number("ask about", step)
        self._progress.note(step)
        return self._saver.should_save(step)

    def _check_running(self, operation: str) -> None:
        if self._end.has_come:
            hint = "build another one; it finds what this one saved"
            raise CheckpointError(operation, "state", self._end.why, hint=hint)

    def reached_preemption(self, step: int) -> bool:
        """Return whether the job is being preempted and all processes act on it at ``step``.

        True on every process from the same step on, the first that no process had begun when the
        notice came; ``save`` saves it in both tiers. The loop then calls ``wait_until_finished``
        and ends. Call it after every step, or never. It does not block, except for a moment after a
        notice. InvalidState for what is no step.
        """
        step = step_number("ask about", step)
        self._progress.note(step)
        return self._opened.watch.reached(step)

    def request_preemption(self) -> None:
        """Give notice of a preemption, as SIGTERM does: all processes save at one step, once.

        Any process may call it, from any thread; one call is enough. Returns at once.

        Raises:
          CheckpointError: after ``stop``, or where no notice is heeded (``on_preemption``).
        """
        self._check_running("request a preemption save of")
        self._opened.watch.request()

    def restore(
        self,
        step: int | Literal["latest"] | None = None,
        *,
        state: _State,
        host_state: object = None,
        tensors_only: bool = False,
    ) -> tuple[int | None, _State]:
        """Restore the newest complete step, or ``step``. Collective; blocks.

        Steps that are newer than ``step`` stay, and a later restore finds them, until the first
        save after this restore: from then on they do not count.

        Args:
          step: restore this step or fail; None and "latest" mean the newest complete one. Equal on
            all processes, else RestoreFailed names two of them.
          state: the state to restore into: arrays, or specs with shape, dtype and sharding. It is
            not changed. Where these have a layout on the devices (a ``Format`` of JAX), so have the
            restored ones. Host values (numpy, numbers) give the types of the returned ones. A
            Python bool, int, float or complex accepts any stored scalar of its kind: a step that
            was 0 at first is an int32 array after the first compiled step.
          host_state: as given to ``save``; objects with ``set_state`` are repositioned in place,
            dicts and lists updated in place. ``last_restore.host_state`` has the restored value.
          tensors_only: leave the step's host state out on purpose, as for an evaluation. Otherwise
            a step that has one is a warning where no process gives a ``host_state``.

        Returns:
          (step, restored state), bit for bit as saved; (None, ``state``) on a fresh start.

        Raises the same kind of error on all processes. Then ``host_state`` is as it was, but for an
        object that refuses that state (event ``restore.note``), and saves go on as if this method
        had not been called. Only what RAM has of incomplete saves, newer than the step that would
        have been restored, may be gone:
          InvalidState: ``step`` or ``state`` is not valid.
          StateMismatch: leaves, shapes or dtypes differ. StepNotFound: ``step`` is not complete.
          HostStateError: saved by another number of processes. Unrecoverable: too much is lost.
          RestoreFailed, PeerLeft, DeadlineExceeded: a process failed, ended, or did not come.
          RamdiskFull: nothing was restored, and there is no room for later saves.
        """
        self._check_running("restore")
        self._progress.restart()
        self._restored_host_state = host_state is not None
        self.makes_way = True
        outcome = self._resume.restore(state, host_state, step, tensors_only=tensors_only)
        self.makes_way = False
        if outcome is None:
            return None, state
        restored, self.last_restore = outcome
        return restored.save.step, restored.state

    def latest_step(self) -> int | None:
        """Return the newest step that this process knows to be complete in some tier, or None.

        Not collective. Reads storage for at most half a minute; without an answer it returns the
        newest step in RAM, with a warning. A save in progress does not count. After a loss only
        ``restore`` can tell which steps are complete.

        Raises:
          PersistentTierError: storage does not answer, and this process's RAM has no step.
        """
        steps = self.all_steps()
        return steps[-1] if steps else None

    def all_steps(self) -> list[int]:
        """Return the known complete steps, oldest first; of RAM the newest. As ``latest_step``."""
        return self._steps.known()

    @property
    def known_steps(self) -> CompleteSteps:
        """The complete steps of each tier: of ``go_on_after``, restored and saved since. No IO.

        Steps that retention has given up are not listed, even before their removal. So the lists
        are equal on all processes that have no save in progress. A process that does not learn how
        a save to storage ended lists the step of that save after the next save.
        """
        saved = self._saver.saved
        return CompleteSteps(saved.of("local"), saved.of("persistent"))

    @property
    def steps(self) -> StepCatalog:
        """Catalogue of the steps of all processes: their list, contents and removal."""
        return self._steps

    def go_on_after(self, steps: CompleteSteps) -> None:
        """Treat ``steps`` as saved, as after a restore of each tier's newest, without a restore.

        On all processes, without a save in progress. After a restore of an older step, steps
        behind it are due all the same.
        """
        self._saver.go_on_after({"local": steps.local, "persistent": steps.persistent})

    @property
    def failed_saves(self) -> int:
        """Number of background saves that failed since the start."""
        return self._failures.count

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Return when this process has no save in progress. Blocks; not collective.

        Raises:
          DeadlineExceeded: it takes longer than ``timeout_s`` (default: the maximum duration of a
            save), or than the grace period after a preemption notice, unless the job goes on: it
            has called ``save`` at a later step.
        """
        self._saver.ending.wait_until_finished(timeout_s)

    def newest_local_save(self) -> Callable[[float | None], bool]:
        """Return a function that waits for the newest save to RAM that this process has begun.

        The function returns whether that save is complete on all processes, as far as this process
        knows, whatever has become of the step since. Its argument, and DeadlineExceeded, as those
        of ``wait_until_finished``. For any thread, also after ``stop``.
        """
        return partial(self._saver.ending.wait_for_local, self._saver.local_result)

    def check_for_errors(self) -> None:
        """Raise the newest background error that was not raised before, if any. Not collective."""
        self._failures.raise_pending()

    def stop(self, timeout_s: float | None = None, *, after_error: bool = False) -> None:
        """Finish the saves in progress and release ramdisk, port and threads. Idempotent.

        The saved bytes stay for the next start of the run. All processes should call it, because a
        stopped process no longer serves its shards. Blocks for the saves at most ``timeout_s``
        (default: their maximum duration); then releases everything and raises DeadlineExceeded.
        At a normal end, which ``after_error`` is not, the newest complete step of RAM goes from its
        slots to storage, where storage lacks it and ``save_every`` has an interval: that may take
        as long again. Where storage lacks the last step even so, the event ``stop.not_saved`` warns
        of it, and says why.

        Raises:
          SaveFailed: the last save to storage failed, or was forced and left out, and
            ``check_for_errors`` has not raised its error. The ``with`` block raises it too, so that
            a run without its last checkpoint does not end with exit status 0. While an exception is
            handled, or with another exit status, it is logged. A failed save to RAM raises nothing
            here, because after the end of training only storage remains.
          DeadlineExceeded: see above.
        """
        if self._end.has_come:
            return
        error = sys.exc_info()[1]
        is_normal_end = not after_error and is_success(error)
        stores_newest = is_normal_end and self._stores_newest
        try:
            with contextlib.ExitStack() as ends:  # in reverse order, and all of it despite errors
                ends.enter_context(self._end.left_to_caller())
                self._opened.expect_no_step()
                ends.callback(self._opened.release, _STOPPED, None if is_success(error) else error)
                if not after_error and error is None:
                    ends.callback(self._opened.note_orderly_end)
                if is_normal_end:
                    ends.callback(self._saver.ending.warn_of_unstored)
                ends.callback(self._saver.ending.stop, timeout_s)
                if stores_newest:
                    ends.callback(self._saver.store_newest, timeout_s)
                ends.callback(
                    lambda: self._left_processes.leave(
                        _STOPPED, self._saver.begun, stores_last=stores_newest
                    )
                )
                if not after_error:
                    self._saver.ending.end_training(timeout_s)
        except BaseException:
            _tell_lost_step(self._failures, raises=False)
            raise
        _tell_lost_step(self._failures, raises=is_normal_end)

    def __enter__(self) -> EmergencyCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if is_good_end(error):
            self.stop()
        elif error is not None and not self._end.has_come:
            self._end.come_after(error)


class CheckpointerConfig(Config):
    """``Config`` with ``instantiate``."""

    def instantiate(self) -> EmergencyCheckpointer:
        """Return a new checkpointer. Collective; blocks; the config may be used again."""
        return EmergencyCheckpointer(self)
