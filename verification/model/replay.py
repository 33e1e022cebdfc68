"""Replay a log against the actions of ``StepLog.tla``: each event is one, or is refused.

An event is what can be seen in storage: a version of the log, or the files of its steps. It is a
dict with a ``kind``; ``KINDS`` lists them with their fields. A version holds its chain as FORMAT.md
says. ``replay`` raises with the first event that no action of the model allows, and with the reason
of each action.

The names of the actions are those of the model. This module shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = Mapping[str, Any]
Save = tuple[int, str]
"""(step, incarnation)."""
Chain = Mapping[str, Any]

KINDS: dict[str, tuple[str, ...]] = {
    "version": ("number", "incarnation", "chain", "steps"),
    "files": ("present",),
}
"""Fields of each kind of event.

``version``: of the log; ``steps``: (step, incarnation, state). ``files``: the saves whose files are
all there, in the step's folder or in that of a hidden one.
"""


class Refused(AssertionError):
    """No action of the model allows an event. ``index``: its place in the trace."""

    def __init__(self, index: int, event: Event, reasons: Iterable[str]) -> None:
        self.index = index
        self.event = event
        super().__init__(f"event {index}, {dict(event)}: " + "; ".join(reasons))


@dataclass
class State:
    """What the trace has shown so far.

    Attributes:
      number, incarnation, chain, entries: of the newest version; 0 and empty before the first.
      present: the saves whose files were all there when they were looked at last.
    """

    number: int = 0
    incarnation: str = ""
    chain: Chain | None = None
    entries: dict[Save, str] = field(default_factory=dict)
    present: frozenset[Save] = frozenset()


class Action(NamedTuple):
    """An action of the model.

    Attributes:
      name: its name in the model. kind: of the events that may be it.
      guard: returns why it does not allow an event; empty when it does.
      effect: changes the state.
    """

    name: str
    kind: str
    guard: Callable[[State, Event], str]
    effect: Callable[[State, Event], None]


def number_of(incarnation: str) -> int:
    """Return the number of an incarnation, which orders lives."""
    return int(incarnation.partition("-")[0])


def life_of(incarnation: str) -> str:
    """Return the life of a save: a forced save has an incarnation of its own within it."""
    return incarnation.partition(".")[0]


def is_plain(incarnation: str) -> bool:
    """Return whether another program, plain Orbax, wrote a save."""
    return "-orbax" in incarnation


def on_chain(save: Save, chain: Chain | None) -> bool:
    """Return whether a chain, or none, lets a save count."""
    step, life = save[0], life_of(save[1])
    if chain is None or life == chain["head"]:
        return True
    number, head = number_of(life), number_of(chain["head"])
    if number > head:
        return True
    if number == head:
        return is_plain(life)
    links = [
        (each["incarnation"], each["last_step"])
        for each in chain["ancestors"]
        if number_of(each["incarnation"]) <= number
    ]
    if not links:
        return step <= chain["oldest_step"]
    if is_plain(life):
        return step <= links[0][1]
    same = [each for each in links if number_of(each[0]) == number]
    own = [each for each in same if each[0] == life]
    if all(is_plain(other) for other, _ in same):
        own = same
    return bool(own) and step <= own[0][1]


def newest(chains: Iterable[Chain | None]) -> Chain | None:
    """Return the chain of the newest life."""
    found = [each for each in chains if each is not None]
    return max(found, key=lambda each: (number_of(each["head"]), each["head"]), default=None)


# The log.


def _created(state: State, event: Event) -> str:
    """Return why a version could not be created after that of ``state``."""
    if state.number and event["number"] != state.number + 1:
        return f"version {event['number']} follows {state.number}"
    here, before = event["incarnation"], state.incarnation
    if before and number_of(here) < number_of(before):
        return f"{before}, which is newer, was on record"
    if before and number_of(here) == number_of(before) and here != before:
        return f"{before} took the same number, and was on record"
    if newest([state.chain, event["chain"]]) != event["chain"]:
        return "its chain is older than that before it"
    steps = [step for step, _, _ in event["steps"]]
    if len(set(steps)) < len(steps):
        return "it has two steps of one number"
    return ""


def _entries(event: Event) -> dict[Save, str]:
    return {(step, incarnation): state for step, incarnation, state in event["steps"]}


def _changes(state: State, event: Event) -> dict[Save, tuple[str, str]]:
    """Return each save whose entry differs, with its states before and after."""
    before, after = state.entries, _entries(event)
    pairs = {save: (before.get(save, ""), after.get(save, "")) for save in {*before, *after}}
    return {save: pair for save, pair in pairs.items() if pair[0] != pair[1]}


def _claim(state: State, event: Event) -> str:
    """Return why a version that names a life, or a chain, may not change what it changes."""
    for save, pair in _changes(state, event).items():
        if pair[1] == "" and pair[0] != "removing" and save in state.present:
            return f"it drops {save}, whose files are there"
        is_own = life_of(save[1]) == event["incarnation"]
        is_found = pair == ("", "complete") and not is_own
        is_dropped = pair[1] == "" and pair[0] != "removing"
        if not (is_found or is_dropped):
            return f"{save} goes from {pair[0]!r} to {pair[1]!r}"
        if is_found and is_plain(save[1]):
            if state.entries:
                return f"it adopts {save} beside a log with entries"
            if number_of(save[1]) >= number_of(event["incarnation"]):
                return f"it adopts {save} as one that is not older than the life"
    return ""


def _adopt(state: State, event: Event) -> str:
    """Return why a version is none in which a person takes in what another program has saved."""
    if event["incarnation"] != state.incarnation or event["chain"] != state.chain:
        return "it claims, or has another chain"
    if not state.entries:
        return "the log has no entry"
    changes = _changes(state, event)
    added = {save for save, pair in changes.items() if pair == ("", "complete")}
    numbers = {step for step, incarnation in added if is_plain(incarnation)}
    for save, (before, after) in changes.items():
        is_replaced = (before, after) == ("complete", "") and save[0] in numbers
        if not (is_replaced or (save in added and is_plain(save[1]))):
            return f"{save} goes from {before!r} to {after!r}"
        if save in added and number_of(save[1]) < number_of(state.incarnation):
            return f"{save} is older than the life on record, which has not adopted the step"
    return "" if numbers else "it adopts no step"


def _hide(state: State, event: Event) -> str:
    """Return why the saves that are hidden now may not be: each is off the chain on record."""
    changes = _changes(state, event)
    for save, pair in changes.items():
        if pair != ("complete", "hidden"):
            return f"{save} goes from {pair[0]!r} to {pair[1]!r}"
        if on_chain(save, state.chain):
            return f"{save} is on the chain"
    return "" if changes else "no change"


def _list_step(state: State, event: Event) -> str:
    changes = _changes(state, event)
    added = [save for save, pair in changes.items() if pair == ("", "complete")]
    if not added:
        return "it lists no step"
    for save, pair in changes.items():
        if pair == ("", "complete") and life_of(save[1]) == event["incarnation"]:
            continue
        return f"{save} goes from {pair[0]!r} to {pair[1]!r}"
    return ""


def _only(before: Iterable[str], after: str) -> Callable[[State, Event], str]:
    """Return a guard: every change is from one of ``before`` to ``after``, and there is one."""

    def guard(state: State, event: Event) -> str:
        changes = _changes(state, event)
        wrong = [
            save for save, pair in changes.items() if pair[0] not in before or pair[1] != after
        ]
        return f"{wrong[0]} goes to another state" if wrong else "" if changes else "no change"

    return guard


def _version(guard: Callable[[State, Event], str]) -> Callable[[State, Event], str]:
    return lambda state, event: _created(state, event) or guard(state, event)


def _append(state: State, event: Event) -> None:
    state.number, state.incarnation = event["number"], event["incarnation"]
    state.chain, state.entries = event["chain"], _entries(event)


# Files.


def _saves(pairs: Iterable[Iterable[Any]]) -> frozenset[Save]:
    return frozenset((step, incarnation) for step, incarnation in pairs)


def _files(state: State, event: Event) -> str:
    listed = {save for save, kind in state.entries.items() if kind == "complete"}
    gone = sorted(listed - _saves(event["present"]))
    return f"the log is behind what was removed: {gone}" if gone else ""


def _look(state: State, event: Event) -> None:
    state.present = _saves(event["present"])


ACTIONS: tuple[Action, ...] = (
    Action("ListStep", "version", _version(_list_step), _append),
    Action("MarkHidden", "version", _version(_hide), _append),
    Action(
        "MarkRemoving", "version", _version(_only(("complete", "hidden", ""), "removing")), _append
    ),
    Action("Unlist", "version", _version(_only(("removing",), "")), _append),
    Action("Adopt", "version", _version(_adopt), _append),
    Action("Claim", "version", _version(_claim), _append),
    Action("DeleteFile", "files", _files, _look),
)


def step(state: State, event: Event, index: int = 0) -> str:
    """Apply the first action that allows ``event``; return its name. Refused when none does."""
    missing = [name for name in KINDS.get(event["kind"], ("kind",)) if name not in event]
    reasons = [f"it has no {name}" for name in missing]
    for action in ACTIONS:
        if missing or action.kind != event["kind"]:
            continue
        reason = action.guard(state, event)
        if not reason:
            action.effect(state, event)
            return action.name
        reasons.append(f"{action.name}: {reason}")
    raise Refused(index, event, reasons)


def replay(trace: Iterable[Event], state: State | None = None) -> list[str]:
    """Return the names of the actions that the events of ``trace`` are. Refused."""
    state = State() if state is None else state
    return [step(state, event, index) for index, event in enumerate(trace)]
