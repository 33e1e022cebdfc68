"""The RAM tier beside an object of Orbax's that keeps storage: for both faces of plain Orbax.

Orbax's object never sees a step of RAM. This class keeps RAM's steps, and answers for one question:
whether a step comes from RAM (``choose``). An error of RAM takes nothing from storage: it is one
warning and one event, and from then on there is no RAM tier (``_give_up``).
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import msgspec
from absl import logging

from emergency_ckpt.checkpointer import EmergencyCheckpointer
from emergency_ckpt.cluster.coordination import connect_start, decode_each, decode_message
from emergency_ckpt.cluster.left_processes import leaving
from emergency_ckpt.cluster.membership import tell_problem
from emergency_ckpt.cluster.round import Round, agree
from emergency_ckpt.config import Config, run_id_of
from emergency_ckpt.config.settings import default_local_dir
from emergency_ckpt.config.validation import listeners_of
from emergency_ckpt.core.save.save_rules import plain_metrics
from emergency_ckpt.core.save.timing import Repeats
from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    HostStateError,
    InvalidState,
    LocalTierError,
    PeerLeft,
    StateMismatch,
    StepNotFound,
    Unrecoverable,
)
from emergency_ckpt.events import EventSink
from emergency_ckpt.json_decoders import decoder_of
from emergency_ckpt.observer import Observer
from emergency_ckpt.orbax.saved_tree import nested
from emergency_ckpt.restore.request import CompleteSteps
from emergency_ckpt.types import LOCAL, PERSISTENT, OrbaxStep

T = TypeVar("T")

_STOP_TIMEOUT_S = 10.0
_NONE = -1
"""No step, in what processes say to each other."""
_OF_STEP = (StateMismatch, HostStateError, InvalidState, StepNotFound, Unrecoverable, ValueError)
"""Errors of a restore about one step, or about what was asked for: RAM is as good as before."""
_OF_SAVED_STEP = (HostStateError, InvalidState)
"""Errors of a save about its step: RAM is as good as before."""


class Items(NamedTuple):
    """The items of one call by name, as the RAM tier keeps them.

    Attributes:
      trees: of arrays and numbers.
      iterators: objects with ``get_state`` and ``set_state``.
      values: of JSON.
      unfit: why the RAM tier cannot keep all items; empty when it can.
    """

    trees: Mapping[str, Any] = {}
    iterators: Mapping[str, Any] = {}
    values: Mapping[str, Any] = {}
    unfit: str = ""


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A description of a step in RAM, which the step's host states have.

    Attributes:
      follows: the newest step of storage when this one was saved; -1 without any.
      processes: the number of processes that saved it.
      trees, iterators, values: the names of its items.
      keys: the implementation of each leaf of PRNG keys, by path; of the manifest.
    """

    follows: int
    processes: int
    trees: tuple[str, ...]
    iterators: tuple[str, ...]
    values: tuple[str, ...]
    keys: Mapping[str, str] = {}

    @property
    def names(self) -> set[str]:
        """The names of all items."""
        return {*self.trees, *self.iterators, *self.values}


class RamChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decision about where a step comes from; the same on all processes.

    Attributes:
      step: the step of RAM to restore; None: RAM's step does not count.
      stored: the step that storage would give: its newest, or the requested one. None without.
      kept: of ``step``.
    """

    step: int | None = None
    stored: int | None = None
    kept: Kept | None = None


class _ProcessView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The knowledge of one process for a choice; -1 for no step.

    Attributes:
      stored: as in ``RamChoice``.
      newest_stored: storage's newest step.
    """

    stored: int
    newest_stored: int
    kept: Kept | None


class _Ignored:
    """Takes the state of an iterator that nobody asks for."""

    def get_state(self) -> None:
        return None

    def set_state(self, state: object, /) -> None:
        del state


class RamBeside:
    """The RAM tier of one object of Orbax's. For the training thread.

    All processes must call the constructor, ``choose``, ``restore``, ``agreed``, ``survey``,
    ``forget`` and ``stop`` in the same order, and ``save`` at the same steps.
    """

    def __init__(
        self,
        directory: os.PathLike[str],
        stored: Callable[[], Collection[int]],
        *,
        local_directory: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        async_save: bool = True,
        logger: Any = None,
        is_off: bool = False,
    ) -> None:
        """Open the RAM tier in a job of several processes, or of one that asks for the tier.

        A job asks by ``local_directory`` or ``settings``. The tier is off with
        ``local_save_every=0``.

        Args:
          directory: of storage.
          stored: the steps of storage that Orbax's object knows. Not collective; no IO.
          local_directory: on this host's ramdisk; None: ``default_local_dir``.
          settings: further settings of ``Config``, by name, without ``dir``.
          async_save: False: ``save`` waits for RAM, unless the settings say otherwise.
          logger: one of Orbax's, which gets the entries of RAM beside an ``on_event``.

        Raises:
          ConfigError: a setting is wrong, on this process.
          ValueError: the settings have ``dir``.
        """
        own_settings = dict(settings or {})
        if "dir" in own_settings:
            raise ValueError("settings without 'dir': Orbax has the directory")
        self._stored = stored
        self._ram: EmergencyCheckpointer | None = None
        self._newest: int | None = None
        self._surveyed: tuple[int, ...] = ()
        self._left_behind: int | None = None
        self._restoring_since_s = 0.0
        self._failures = 0
        self._has_told_unfit = False
        self._left_out = Repeats()
        self._numbers = itertools.count()
        if is_off or not (jax.process_count() > 1 or local_directory is not None or own_settings):
            return
        local = os.path.abspath(os.fspath(local_directory or default_local_dir(os.environ)))
        defaults = {
            "local_dir": local,
            "run_id": run_id_of(os.fspath(directory)),
            "on_preemption": "ignore",  # Orbax's policy saves then, to storage
            "async_save": async_save,
        }
        config = _checked({**defaults, **own_settings})
        if not config.save_plans():
            return
        log = None
        if logger is not None:
            from emergency_ckpt.extras.metrics import CheckpointLog  # noqa: PLC0415 - an extra

            log = CheckpointLog(logger, dir=os.fspath(directory), local_dir=config.local_dir)
            config.set(on_event=[log, *listeners_of(config.on_event)])
        try:
            self._ram = EmergencyCheckpointer(config)
        except Exception as error:  # noqa: BLE001 - of RAM: storage goes on
            listeners = listeners_of(config.on_event)
            plain = [listener for listener in listeners if not isinstance(listener, Observer | str)]
            _report_given_up(EventSink(*plain, process_index=jax.process_index()), "start", error)
            return
        if log is not None:
            self._ram.steps.job.events.on_close(log.close)
        self.survey()

    @property
    def is_on(self) -> bool:
        """True where there is a RAM tier."""
        return self._ram is not None

    @property
    def newest(self) -> int | None:
        """RAM's newest step, where that is whole and newer than storage's; no IO.

        As of the last ``survey``, ``restore`` or ``wait``.
        """
        step = self._newest
        return step if step is not None and step > self._newest_stored() else None

    # Saving.

    def save(
        self,
        step: int,
        items_of: Callable[[], Items],
        *,
        metrics: Any,
        custom_metadata: Any,
        force: bool,
    ) -> bool:
        """Save to RAM if a save is due there; return whether it was. Not collective.

        Call it after Orbax's object has begun its own save of ``step``, whatever that decided. The
        first call after a rollback is collective, and blocks. ``items_of``: asked when a save is
        due.

        A step that this process cannot save, such as one whose iterator has no state, is left out
        of RAM here. The other processes learn of that, and the step is whole on none.

        Raises:
          PeerLeft: a process has died, so that the arrays of the state will never be computed.
        """
        self._attempt("go back in", self._go_back, None)
        if self._ram is None:
            return False
        try:
            if not (force or self._ram.should_save(step)):
                return False
            self._look_at_failures(self._ram)
            items, metadata = items_of(), dict[str, Any]()
            if not items.unfit:
                try:
                    metadata = _metadata(metrics, custom_metadata)
                except InvalidState as error:
                    items = Items(unfit=str(error))
            if items.unfit:
                self._leave_out(self._ram, step, items.unfit, force=force)
                return False
            return self._save(self._ram, step, items, metadata, force=force)
        except PeerLeft:
            raise
        except _OF_SAVED_STEP as error:
            if self._left_out.occurred(type(error).__name__, time.monotonic()) is not None:
                _tell_left_out(self._ram, step, f"step {step} is not saved to RAM: {error}")
        except Exception as error:  # noqa: BLE001 - of RAM: storage goes on
            self._give_up("save", error)
        return False

    def _save(
        self,
        ram: EmergencyCheckpointer,
        step: int,
        items: Items,
        metadata: Mapping[str, Any],
        *,
        force: bool,
    ) -> bool:
        names = tuple(items.trees)
        kept = Kept(
            self._newest_stored(),
            jax.process_count(),
            names,
            tuple(items.iterators),
            tuple(items.values),
        )
        host_state = {
            "iterators": dict(items.iterators),
            "values": dict(items.values),
            "kept": msgspec.json.encode(kept),
            "metadata": dict(metadata),
        }
        orbax = OrbaxStep(items=names, **metadata)  # for a step that is drained
        state = _state_of(items.trees)
        return ram.save(step=step, state=state, host_state=host_state, force=force, orbax=orbax)

    def _look_at_failures(self, ram: EmergencyCheckpointer) -> None:
        """Raise what ends the RAM tier: a ramdisk without room, another process without RAM."""
        if ram.failed_saves == self._failures:
            return
        self._failures = ram.failed_saves
        try:
            ram.check_for_errors()
        except CheckpointError as error:
            cause = error.__cause__
            if isinstance(cause, LocalTierError) and not cause.retryable:
                raise cause from error
        leavers = leaving(ram.steps.job.coordinator)
        if leavers:
            raise CheckpointError("save to", "RAM", "; ".join(list(leavers.values())[:4]))

    def _leave_out(
        self, ram: EmergencyCheckpointer, step: int, reason: str, *, force: bool
    ) -> None:
        """Leave a step to storage, which the job is told once."""
        if not self._has_told_unfit:
            self._has_told_unfit = True
            _tell_left_out(ram, step, f"steps of this kind are saved to storage alone: {reason}")
        ram.leave_out(step=step, problem=reason, force=force)

    # Choosing a step.

    def choose(self, requested_step: int | None = None) -> RamChoice:
        """Return whether a step, the newest one for None, comes from RAM. Collective; blocks.

        The newest comes from RAM where RAM has a whole step that is no older than storage's newest:
        after a rollback, steps of RAM are behind those of storage that nobody has deleted.
        A step of storage that is newer than what RAM's step follows is another job's work, such as
        a week's with plain Orbax: then RAM's step does not count.
        """
        requested_step = None if requested_step is None else int(requested_step)
        stored = self._stored_for(requested_step)
        of_storage = RamChoice(stored=None if stored == _NONE else stored)
        return self._attempt(
            "list steps in", lambda ram: self._agree(ram, requested_step), of_storage
        )

    def _stored_for(self, requested_step: int | None) -> int:
        """Return the step that storage would give for ``requested_step``; -1 for none."""
        if requested_step is None:
            return self._newest_stored()
        return requested_step if requested_step in self._stored() else _NONE

    def _agree(self, ram: EmergencyCheckpointer, requested_step: int | None) -> RamChoice:
        ram.wait_until_finished()
        self._surveyed = local_steps = ram.steps.survey(()).local
        step = max(local_steps, default=None) if requested_step is None else requested_step
        kept = None if step is None or step not in local_steps else _kept(ram, step)
        job, name = ram.steps.job, f"choice/{next(self._numbers)}"
        may_remap = job.config.host_state_remap is not None

        def rule(messages: Mapping[int, bytes]) -> bytes:
            unreadable = _ProcessView(_NONE, _NONE, None)
            views = decode_each(messages, _ProcessView, name, lambda _: unreadable)
            return msgspec.json.encode(
                _chosen(step, views, requested_step=requested_step, may_remap=may_remap)
            )

        choice_round = Round(
            job.coordinator,
            name,
            job.config.time_limits.patience_s,
            prompt=True,
            series=job.restores,
        )
        own = msgspec.json.encode(
            _ProcessView(self._stored_for(requested_step), self._newest_stored(), kept)
        )
        data = choice_round.hold(own, choice_round.when_all(rule))
        return decode_message(data, RamChoice, f"{name}.told")

    def survey(self) -> None:
        """Agree on RAM's newest step. Collective; blocks."""
        self._newest = self.choose().step

    def _newest_stored(self) -> int:
        return max(self._stored(), default=_NONE)

    def agreed(self, problem: str) -> str:
        """Return the problems of all processes, the same on all; empty without. Collective."""

        def ask(ram: EmergencyCheckpointer) -> str:
            job, name = ram.steps.job, f"problem/{next(self._numbers)}"
            limit_s = job.config.time_limits.patience_s
            return agree(job.coordinator, name, problem, limit_s, job.restores)

        return self._attempt("agree beside", ask, problem)

    # Restoring.

    @contextlib.contextmanager
    def restoring(self) -> Generator[None]:
        """Let the next manager of this process have the RAM tier where the block fails.

        Until this manager saves or restores something.
        """
        self._restoring_since_s = time.monotonic()
        try:
            yield
        except BaseException:
            if self._ram is not None:
                self._ram.makes_way = True
            raise
        if self._ram is not None:
            self._ram.makes_way = False

    def restore(self, choice: RamChoice, items: Items) -> dict[str, Any] | None:
        """Return the items of the step that was chosen, by name; None: it is storage's turn.

        Collective; blocks. ``items``: what to restore into, the same on all processes.

        Raises:
          ValueError, CheckpointError: the step cannot be restored, or not into ``items``, and
            storage has no step in its place.
        """
        ram, kept = self._ram, choice.kept
        if ram is None or choice.step is None or kept is None:
            return None
        try:
            if items.unfit:
                problem = f"step {choice.step} is in RAM alone, and cannot be loaded from there"
                raise ValueError(f"{problem}: {items.unfit}")
            restored = _restored(ram, choice.step, kept, items)
        except Exception as error:
            if not isinstance(error, _OF_STEP):
                self._give_up("restore", error)
            if choice.stored is None:
                raise
            if choice.stored != choice.step:
                self._newest = None
                logging.warning(
                    "step %d of RAM is left out, and step %d is taken from storage: %s",
                    choice.step,
                    choice.stored,
                    error,
                )
            return None
        self._left_behind = None
        self._newest = choice.step
        return restored

    def go_on_from(self, step: int | None) -> None:
        """Let saves go on from a step that Orbax's object has restored. On all processes.

        Steps of RAM that are newer count until the next call of ``save``, which removes them. To be
        called within ``restoring``, whose time is that of the restore in the event.
        """
        if self._ram is None or step is None:
            return
        steps = self._known(self._ram)
        self._left_behind = step if any(known_step > step for known_step in steps) else None
        if self._left_behind is None:
            self._ram.go_on_after(CompleteSteps(tuple(sorted(steps))))
        seconds = time.monotonic() - self._restoring_since_s
        self._ram.steps.job.events.emit(
            "restore.stage", stage="loaded", step=int(step), tier=PERSISTENT, seconds=seconds
        )

    def _go_back(self, ram: EmergencyCheckpointer) -> None:
        """Remove the steps that are newer than the one that was restored. Collective."""
        if self._left_behind is None:
            return
        step, self._left_behind, self._newest = self._left_behind, None, None
        ram.wait_until_finished()
        for newer in sorted(known_step for known_step in self._known(ram) if known_step > step):
            ram.steps.remove(newer)
        self._surveyed = tuple(known_step for known_step in self._surveyed if known_step <= step)
        ram.go_on_after(CompleteSteps((step,)))

    def _known(self, ram: EmergencyCheckpointer) -> set[int]:
        return {*self._surveyed, *ram.known_steps.local}

    def contents_of(self, step: int | None) -> tuple[int, dict[str, Any], Mapping[str, Any]] | None:
        """Return RAM's ``newest`` step, its trees by name, and its metadata.

        None where ``step`` is another step. The trees have ``jax.ShapeDtypeStruct``, in dicts by
        path. Not collective. StepNotFound: this process holds no part of the step.
        """
        newest = self.newest
        if self._ram is None or newest is None or step not in (None, newest):
            return None
        description = self._ram.steps.describe(newest)
        kept: Kept = decoder_of(Kept).decode(description.host_state["kept"])
        tree = nested(description.leaves)
        trees = tree if len(kept.trees) > 1 else dict.fromkeys(kept.trees, tree)
        return newest, trees, description.host_state["metadata"]

    def has(self, step: int) -> bool:
        """Return whether RAM has ``step``. Collective; blocks."""
        try:
            number = operator.index(step)
        except TypeError:  # also for 7.0, which is equal to 7: Orbax refuses it
            return False

        def look(ram: EmergencyCheckpointer) -> bool:
            ram.wait_until_finished()
            return number in ram.steps.survey(()).local

        return self._attempt("list steps in", look, False)

    def forget(self, step: int) -> bool:
        """Remove ``step`` from RAM; return whether RAM had it. Collective; blocks.

        Call ``survey`` when storage has removed the step as well.
        """

        def remove(ram: EmergencyCheckpointer) -> bool:
            ram.steps.remove(operator.index(step))
            return True

        return self.has(step) and self._attempt("remove from", remove, False)

    # Waiting and ending.

    def wait(self) -> None:
        """Wait for the save to RAM in progress. A failed save is in the log and in the events."""
        self._attempt("wait for", self._wait, None)

    def outcome_of_newest(self) -> Callable[[float | None], bool]:
        """Return a function that waits for the newest save that has begun: is it complete?

        For any thread, also after ``stop``. The function raises DeadlineExceeded.
        """
        ram = self._ram
        if ram is None:
            return lambda _: False
        newest_save = ram.newest_local_save()

        def outcome(timeout_s: float | None) -> bool:
            is_complete = newest_save(timeout_s)
            self._note_newest(ram)
            return is_complete

        return outcome

    def _wait(self, ram: EmergencyCheckpointer) -> None:
        ram.wait_until_finished()
        self._note_newest(ram)

    def _note_newest(self, ram: EmergencyCheckpointer) -> None:
        step = max(ram.known_steps.local, default=None)
        if self._ram is ram and step is not None and self._left_behind is None:
            self._newest = step

    def stop(self, *, after_error: bool = False) -> None:
        """Finish the save in progress and release everything. All processes should call it."""
        ram, self._ram, self._newest = self._ram, None, None
        if ram is None:
            return
        try:
            ram.stop(after_error=after_error)
        except Exception as error:  # noqa: BLE001 - of RAM: storage goes on
            _report_given_up(ram.steps.job.events, "stop", error)

    def _attempt(
        self, operation: str, act: Callable[[EmergencyCheckpointer], T], otherwise: T
    ) -> T:
        """Return what ``act`` returns; ``otherwise`` without a RAM tier, or where ``act`` fails."""
        if self._ram is None:
            return otherwise
        try:
            return act(self._ram)
        except Exception as error:  # noqa: BLE001 - of RAM: storage goes on
            self._give_up(operation, error)
            return otherwise

    def _give_up(self, operation: str, error: Exception) -> None:
        """Go on without a RAM tier; the other processes see this process leave theirs."""
        ram, self._ram, self._newest = self._ram, None, None
        if ram is None:
            return
        _report_given_up(ram.steps.job.events, operation, error)
        try:
            ram.stop(_STOP_TIMEOUT_S, after_error=True)
        except Exception as failure:  # noqa: BLE001 - as above
            logging.info("the RAM tier could not be stopped: %s", failure)


def _checked(settings: Mapping[str, Any]) -> Config:
    """Return the config. ConfigError, which the others learn, since they wait for this process."""
    try:
        config = Config().set(**settings)
        config.validated()
    except ConfigError as error:
        tell_problem(connect_start(), error)
        raise
    return config


def _report_given_up(events: EventSink, operation: str, error: Exception) -> None:
    reason = f"there is no RAM tier from now on, and storage goes on alone: {error}"
    events.emit("ram.off", cause="given_up", operation=operation, reason=reason[:500])


def _metadata(metrics: Any, custom_metadata: Any) -> dict[str, Any]:
    """Return the metadata of a step, as the step's host states have them. InvalidState."""
    return {
        "metrics": plain_metrics(metrics),
        "custom_metadata": plain_metrics(custom_metadata or {}, "custom_metadata"),
    }


def _tell_left_out(ram: EmergencyCheckpointer, step: int, reason: str) -> None:
    ram.steps.job.events.emit("save.skipped", step=step, tier=LOCAL, cause="unfit", reason=reason)


def _kept(ram: EmergencyCheckpointer, step: int) -> Kept | None:
    """Return what RAM has of a step; None where this process cannot, or another class saved it."""
    try:
        description = ram.steps.describe(step)
        kept: Kept = decoder_of(Kept).decode(description.host_state["kept"])
        keys = {
            leaf.path: leaf.key_impl for leaf in description.leaves if leaf.key_impl is not None
        }
        return msgspec.structs.replace(kept, keys=keys)
    except (CheckpointError, msgspec.MsgspecError, KeyError, TypeError):
        return None


def _chosen(
    step: int | None,
    views: Mapping[int, _ProcessView],
    *,
    requested_step: int | None,
    may_remap: bool,
) -> RamChoice:
    """Return the choice for all processes, by the storage of the first one.

    ``step``: RAM's, which RAM may not have.
    """
    first = views[0]
    stored = None if first.stored == _NONE else first.stored
    kept_steps = [view.kept for view in views.values() if view.kept is not None]
    if step is None or not kept_steps:
        return RamChoice(stored=stored)
    kept = max(kept_steps, key=lambda record: record.follows)
    is_of_each = bool(kept.iterators or kept.values) and not may_remap
    counts = kept.processes == len(views) or not is_of_each
    if requested_step is None:
        counts = counts and first.newest_stored <= min(step, kept.follows)
    elif stored is not None:
        counts = counts and requested_step <= kept.follows
    return RamChoice(step, stored, kept) if counts else RamChoice(stored=stored)


def _state_of(trees: Mapping[str, Any]) -> Any:
    """Return the state that RAM keeps for some items: of the only one its tree, else a dict."""
    return next(iter(trees.values())) if len(trees) == 1 else dict(trees)


def _restored(ram: EmergencyCheckpointer, step: int, kept: Kept, items: Items) -> dict[str, Any]:
    """Return the items of a step in RAM by name. Collective."""
    if set(items.trees) != set(kept.trees):  # the state of one tree does not have its name
        saved, given = sorted(kept.trees), sorted(items.trees)
        raise ValueError(f"step {step} in RAM has the trees {saved}, and {given} are given")
    missing = sorted({*items.iterators, *items.values} - {*kept.iterators, *kept.values})
    if missing:
        hint = "do not ask for them"
        raise HostStateError(
            "restore", f"items {missing} of step {step}", "none were saved", hint=hint
        )
    host_state: dict[str, Any] | None = None
    if items.iterators or items.values:
        iterators = {name: items.iterators.get(name, _Ignored()) for name in kept.iterators}
        host_state = {"iterators": iterators, "values": {}, "kept": {}, "metadata": {}}
    target, wants_none = _state_of(items.trees), host_state is None
    _, state = ram.restore(step, state=target, host_state=host_state, tensors_only=wants_none)
    trees = dict.fromkeys(items.trees, state) if len(items.trees) == 1 else state
    values = {name: host_state["values"][name] for name in items.values} if host_state else {}
    return {**trees, **items.iterators, **values}
