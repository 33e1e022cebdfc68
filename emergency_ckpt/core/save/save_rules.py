"""Rules of a save: when it is due, its arguments and completeness; and which steps stay. Pure."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec

from emergency_ckpt.core.limits import MAX_DEPTH, MAX_ITEMS, MAX_METRICS_BYTES, MAX_STEP
from emergency_ckpt.core.step_names import METRICS, is_item_name
from emergency_ckpt.core.wording import processes_text, seconds_text
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.types import PERSISTENT, OrbaxStep, TierName


class StepRules(NamedTuple):
    """Rules that need the step alone, so all processes decide alike; one that applies is enough.

    Attributes:
      intervals: due at multiples of each; 0 or less: never.
      steps: due at every step in one of these.
      initial: due before anything was saved or restored.
    """

    intervals: tuple[int, ...] = ()
    steps: tuple[Container[Any], ...] = ()
    initial: bool = False


_NAMED_AT_MOST = 8


def skip_reason(tier: TierName, limit_s: float, *, waits_for_others: bool) -> tuple[str, str]:
    """Return why a save is skipped when the previous one to ``tier`` is not finished, and a hint.

    Args:
      limit_s: seconds that the save has waited for the previous one.
      waits_for_others: this process has done its part of the previous save, other processes not.
    """
    if waits_for_others:
        return (
            "the previous save still waits for other processes"
            + (f" after {limit_s:.3g} s" if limit_s else ""),
            "make sure that all processes call save at the same steps; the error of that save "
            "names the missing processes"
            if limit_s
            else "find out why a process is slow; or save less often",
        )
    problem = "the previous save is still under way"
    if limit_s:
        problem = f"the previous save has not ended within {limit_s:.3g} s"
    if tier == PERSISTENT:
        return (
            problem,
            "find out why storage, or another process that writes there, is slow; or save to it "
            "less often",
        )
    return problem, "save to RAM less often, or find out why this host is slow"


def too_often_text(step: int, before: int | None, taken_s: float, interval_s: float) -> str:
    """Return why ``step`` is not saved to RAM: the save of the step ``before`` takes too long.

    ``taken_s``: since that save began. ``interval_s``: between the due saves.
    """
    return (
        f"step {step} is not saved to RAM: the save of step {before} has taken"
        f" {seconds_text(taken_s)} so far, and saves are due every {seconds_text(interval_s)}; save"
        " to RAM less often, or find out why a host is slow"
    )


def is_due(rules: StepRules, step: int, last_saved: int | None) -> bool:
    """Return whether any of ``rules`` wants ``step``.

    ``last_saved``: the last step saved or restored in this life of the job; None before the first.
    """
    if last_saved is not None and step <= last_saved:
        return False
    return (
        (rules.initial and last_saved is None)
        or any(interval > 0 and step % interval == 0 for interval in rules.intervals)
        or any(step in steps for steps in rules.steps)
    )


def decide_vote(
    expected: Iterable[int], published: Iterable[int], refused: Iterable[int]
) -> tuple[bool, str]:
    """Return whether every expected process published the save and none refused it; the reason.

    Votes of processes that are not expected do not count. A process that did both has refused.
    """
    voters = frozenset(expected)
    against = voters & frozenset(refused)
    absent = voters - frozenset(published) - against
    if not voters:
        return False, "no process was expected to publish"
    if not against and not absent:
        return True, all_published(len(voters))
    parts: list[str] = []
    if against:
        parts.append(f"{processes_text(against)} refused")
    if absent:
        parts.append(f"{processes_text(absent)} did not publish")
    return False, "; ".join(parts)


def all_published(count: int) -> str:
    """Return the reason of a complete save of ``count`` processes."""
    return f"all {count} processes published"


def step_number(operation: str, step: object, *, hint: str = "") -> int:
    """Return ``step`` as an int. Accepts whole numbers of numpy and JAX; blocks for the latter.

    Raises:
      InvalidState: it is no whole number from 0 to ``MAX_STEP``.
    """
    if type(step) is int and 0 <= step <= MAX_STEP:
        return step
    number = None
    if not isinstance(step, bool):
        try:
            number = operator.index(step)  # pyright: ignore[reportArgumentType]
        except TypeError:
            number = None
    if number is None or not 0 <= number <= MAX_STEP:
        raise InvalidState(
            operation,
            f"step {str(step)[:100]!r}",
            "this is not the number of a step",
            expected=f"a whole number from 0 to {MAX_STEP}",
            actual=type(step).__name__,
            hint=hint,
        )
    return number


def wanted_step(operation: str, step: object) -> int | None:
    """Return the step to restore; None for the newest, as for ``"latest"``.

    Raises:
      InvalidState: it is neither None, ``"latest"`` nor a whole number from 0 to ``MAX_STEP``.
    """
    if step is None or (isinstance(step, str) and step == "latest"):
        return None
    hint = "None or 'latest' means the newest step; give the state by its name, state=..."
    return step_number(operation, step, hint=hint)


def named_metrics(metrics: object) -> Any:
    """Return the metrics of a step as ``plain_metrics``; InvalidState when they are no mapping."""
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise InvalidState("save", "metrics", f"a {kind} is no mapping of names to values")
    plain = plain_metrics(metrics)
    size = len(msgspec.json.encode(plain))
    if size > MAX_METRICS_BYTES:  # each version of the step log has the metrics of all steps
        problem = f"{size} bytes are too many (at most {MAX_METRICS_BYTES})"
        raise InvalidState("save", "metrics", problem)
    return plain


def check_items(orbax: OrbaxStep, state: object) -> None:
    """Raise InvalidState when the items of a step cannot be stored under their names.

    Several items need a ``state`` that is a dict by their names.
    """
    names = set(orbax.items or ())
    wrong = sorted(name for name in names if not is_item_name(name))
    if METRICS in names and orbax.metrics is not None:
        wrong.append(METRICS)
    if wrong or len(names) > MAX_ITEMS:
        problem = f"names that no item can have: {wrong[:_NAMED_AT_MOST]}, of {len(names)}"
        hint = f"at most {MAX_ITEMS} names of folders that are not hidden"
        raise InvalidState("save", "items", problem, hint=hint)
    if orbax.items is None or len(orbax.items) == 1:
        return
    keys = set(cast("Mapping[Any, Any]", state)) if isinstance(state, Mapping) else set[Any]()
    if orbax.items and (keys != set(orbax.items) or len(keys) < len(orbax.items)):
        raise InvalidState("save", "items", "they are not the keys of the state")


def plain_metrics(metrics: Any, what: str = "metrics") -> Any:
    """Return ``metrics`` as JSON values: numbers and lists for scalars and arrays of numpy and JAX.

    Blocks for values on devices. ``InvalidState`` for anything that is no JSON value.
    """
    try:
        text = json.dumps(_plain(metrics, MAX_DEPTH), ensure_ascii=False)
        text.encode()  # a name of a file may be no Unicode
        # Of a subclass of float, int or str the value remains: msgspec takes no subclass.
        return json.loads(text)
    except (TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise InvalidState(
            "save", what, f"they are not JSON values: {error}", hint="give plain numbers"
        ) from error


def plain_orbax(orbax: OrbaxStep) -> OrbaxStep:
    """Return ``orbax`` with its metrics and metadata as ``plain_metrics`` returns them."""
    return msgspec.structs.replace(
        orbax,
        metrics=plain_metrics(orbax.metrics),
        custom_metadata=plain_metrics(orbax.custom_metadata, "custom_metadata"),
    )


def _plain(value: Any, depth: int) -> Any:
    if depth == 0:
        raise ValueError("they are nested too deeply")
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        if wrong := [key for key, _ in items if not isinstance(key, str)]:
            raise TypeError(f"the key {wrong[0]!r:.100} is no text")
        return {key: _plain(item, depth - 1) for key, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, depth - 1) for item in cast("Sequence[Any]", value)]
    # Arrays and scalars of numpy and JAX; this package's core knows neither.
    return value.tolist() if hasattr(value, "dtype") and hasattr(value, "tolist") else value


NonFinite = Literal["off", "report"]
"""What a job does about values that are NaN or infinite: nothing, or say so."""


class StepRecord(NamedTuple):
    """A complete step. ``time_s``: Unix time of its save; ``metrics``: as given to ``save``."""

    step: int
    time_s: float
    metrics: Mapping[str, Any] | None = None


def metric_number(metric_of: Callable[[Any], Any], metrics: Any) -> float | None:
    """Return the number that ``metric_of`` makes of ``metrics``; None where it is not finite.

    JSON has neither NaN nor infinity, so the step log has null for both: where ``metric_of`` cannot
    calculate with null, there is no number either.
    """
    try:
        number = metric_of(metrics)
    except TypeError:
        if not _has_null(metrics):
            raise
        return None
    return number if number is not None and math.isfinite(number) else None


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_null, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, list | tuple):
        return any(map(_has_null, cast("Sequence[Any]", value)))
    return value is None


def wanted_by_fields(
    steps: Sequence[int], keep_last_n: int | None, keep_every_n_steps: int | None
) -> list[bool]:
    """Return True for the last ``keep_last_n`` and multiples of ``keep_every_n_steps``.

    ``keep_last_n`` None keeps all.
    """
    if keep_last_n is None:
        return [True] * len(steps)
    last = set(steps[-keep_last_n:]) if keep_last_n > 0 else set[int]()
    return [
        step in last or (keep_every_n_steps is not None and step % keep_every_n_steps == 0)
        for step in steps
    ]


def choose_removals(steps: Sequence[int], is_wanted: Sequence[bool]) -> tuple[int, ...]:
    """Return the unwanted steps, oldest first, but never the last complete one.

    ``steps``: the complete steps, oldest first. ``is_wanted``: the policy's answer for each;
    ValueError when it did not answer for each.
    """
    if len(is_wanted) != len(steps):
        raise ValueError(f"the policy answered for {len(is_wanted)} of {len(steps)} steps")
    newest = max(steps, default=None)
    unwanted = (step for step, want in zip(steps, is_wanted, strict=True) if not want)
    return tuple(sorted(step for step in unwanted if step != newest))
