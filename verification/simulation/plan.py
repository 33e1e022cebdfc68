"""The plan of one history: shapes, faults and their moments, all drawn from the seed.

A plan is a value, so that a failing one can be made smaller and be written down. Most histories
have few kinds of faults, and these often: many kinds at once hide one another.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from typing import Any, Literal

SHAPES = (
    *((2, 1), (2, 1), (2, 1), (2, 2), (2, 2), (3, 1), (3, 1), (4, 1), (3, 2), (2, 3), (4, 2)),
    *((2, 4), (1, 2), (1, 2), (1, 3)),
)
"""(slices, processes of each): 2 to 8 processes."""

DAY_S = 86400.0
"""The most that a wall clock is wrong, either way."""
_BUCKETS = 8
"""In two of so many histories storage, if any, is a bucket."""
_NOTICES = 8
"""In one of so many histories a process gives notice of a preemption in most lives."""
_POLICIES = 5
"""In one of so many histories most lives save by the clock, at steps that the leader announces."""
_RETURNS = 4
"""In one of so many histories lives also go back to a named step, restore twice or force saves."""
SLOW_STORAGE_S = 1.0
"""Storage whose calls may take longer may be taken for one that does not answer."""


@dataclasses.dataclass(frozen=True)
class Life:
    """One life of the job.

    Attributes:
      slices: the process indices of each slice. hosts: the host of each process.
      begins: how the loop begins: with "restore", with "back", a
        restore of the step ``back`` before the newest, or without: at step "zero", or "ahead" of
        all steps that were saved.
      wiped: hosts that lose their RAM before it.
      clocks: (host, seconds) that its wall clock is ahead from the start of this life on.
      clock_jumps: (host, second of this life, seconds that it is ahead from then on).
      flips: (host, choice of a bit) of bits that change at rest.
      steps: how many are trained. interval: of saves. step_s: length of a step.
      announced: saves by a policy that the leader is asked about, in the place of ``interval``.
      forces: every second save is forced. waits: the loop waits for each save.
      ends_well: the loop ends with ``stop``.
      killed_at_call: (process, number of calls) after which it is killed.
      killed_in_step: (process, step of this life, number of calls after its begin) likewise.
      takes_others: such a death takes the processes ``killed_together`` along.
      killed_all_after_s: when the processes ``killed_together`` (none: all) are killed at once.
      noticed_after_s: how long the others run on after a death.
      outages: (process, second, length) in which its calls of the service are lost.
      full: processes whose ramdisk has no room in the first steps.
      service_slow_s, service_lost, network_faults: of each call; the last two are probabilities.
      storage_slow_s, storage_faults: of each call of storage. storage_gone: all of them fail.
      listing_late_s: a host sees a folder of storage as it was up to so long ago, unless it has
        changed the folder since.
      creates_unheard: probability that the answer to a create that succeeded is lost.
      stalls: (process, what, number, seconds): before so many calls of storage ("call"), creates
        ("create"), deletions ("delete") or small files of Orbax's commit ("commit") it stalls,
        which ends the life; it wakes up so much later, perhaps in the next life, where it is a
        second writer, unless its host is needed there.
      noticed: (process, step of this life) that gives notice of a preemption; no other life heeds
        one. All act on it at one step, which is their last.
      stay: probability that a thread goes on where another could run.
      again: so many steps follow after a second restore, of the step ``again_back`` before the
        newest; 0: there is none.
      writes_s: (process, least, most) seconds of each write of its to RAM. All begin each step
        together then, as a training step does, and the step takes ``step_s``.
      heals: nothing fails any more after the last step; then some more steps are trained.
    """

    slices: tuple[tuple[int, ...], ...]
    hosts: tuple[int, ...]
    begins: Literal["restore", "back", "zero", "ahead"] = "restore"
    back: int = 1
    wiped: tuple[int, ...] = ()
    clocks: tuple[tuple[int, float], ...] = ()
    clock_jumps: tuple[tuple[int, float, float], ...] = ()
    flips: tuple[tuple[int, float], ...] = ()
    steps: int = 4
    interval: int = 1
    announced: Literal["", "continuous", "seconds"] = ""
    step_s: float = 1.0
    forces: bool = False
    waits: bool = False
    ends_well: bool = False
    killed_at_call: tuple[tuple[int, int], ...] = ()
    killed_in_step: tuple[tuple[int, int, int], ...] = ()
    takes_others: bool = False
    killed_all_after_s: float = 0.0
    killed_together: tuple[int, ...] = ()
    noticed_after_s: float = 1.0
    outages: tuple[tuple[int, float, float], ...] = ()
    full: tuple[int, ...] = ()
    service_slow_s: float = 0.0
    service_lost: float = 0.0
    network_faults: float = 0.0
    storage_slow_s: float = 0.01
    storage_faults: float = 0.0
    storage_gone: bool = False
    listing_late_s: float = 0.0
    creates_unheard: float = 0.0
    stalls: tuple[int, str, int, float] | tuple[()] = ()
    noticed: tuple[int, int] | tuple[()] = ()
    stay: float = 0.0
    again: int = 0
    again_back: int = 0
    writes_s: tuple[tuple[int, float, float], ...] = ()
    heals: bool = False

    @property
    def restores(self) -> bool:
        """True when the loop restores before it trains."""
        return self.begins in ("restore", "back")

    @property
    def rest(self) -> Life:
        """Return the part of this life after its second restore, as a life of its own."""
        begins = "back" if self.again_back else "restore"
        return dataclasses.replace(self, begins=begins, back=self.again_back)

    @property
    def is_calm(self) -> bool:
        """True when nothing fails during this life, so that no call may raise."""
        return not (
            self.killed_at_call
            or self.killed_in_step
            or self.killed_all_after_s
            or self.full
            or self.service_lost
            or self.outages
            or self.network_faults
            or self.storage_faults
            or self.creates_unheard
            or self.stalls
            or self.storage_gone
            or self.storage_slow_s > SLOW_STORAGE_S
            # Each process costs a round some calls one after the other, and storage has its share.
            or (self.service_slow_s >= 1 and (len(self.hosts) > 4 or self.storage_slow_s > 0))
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """One history.

    ``hosts``: their number. ``stored_every``: steps between saves to storage; 0: there is none.
    ``in_bucket``: storage is an object store.
    """

    seed: int
    hosts: int
    placement: str
    keep_last_n: int
    stored_every: int
    lives: tuple[Life, ...]
    in_bucket: bool = False


KINDS = (
    *("kills", "ends", "losses", "flips", "clocks", "moves", "crowds"),
    *("network", "service", "full", "storage", "begins", "listings", "creates", "writers"),
)
"""Kinds of faults that a history may have often, or not at all."""


class _Odds:
    """Draws whether a fault occurs: of few kinds often, or of all kinds now and then."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._factors = dict.fromkeys(KINDS, 1.0)
        if rng.random() < 0.6:
            often = rng.sample(KINDS, rng.choice((1, 2, 3, 3, 4)))
            self._factors = {kind: 2.5 if kind in often else 0.0 for kind in KINDS}

    def happens(self, kind: str, probability: float) -> bool:
        """Return whether a fault of ``kind`` occurs; ``probability``: in a usual history."""
        return self._rng.random() < min(probability * self._factors[kind], 0.9)


def draw(seed: int) -> Plan:
    """Return the plan of a seed."""
    rng = random.Random(f"plan {seed}")
    odds = _Odds(rng)
    slices, per_slice = rng.choice(SHAPES)
    count = slices * per_slice
    stored_every = rng.choice((0, 0, 1, 2, 3))
    has_spare = odds.happens("moves", 0.3) or (stored_every and odds.happens("writers", 0.5))
    hosts = count + (1 if has_spare else 0)
    is_crowded = odds.happens("crowds", 0.2)
    placement = rng.choice(("all_but_primary", "all_but_primary", "striped(2)"))
    lives, most_steps = rng.choice(((5, 5), (5, 5), (4, 5), (9, 2)))
    placed = tuple(range(count))
    members = _members(slices, per_slice)
    drawn: list[Life] = []
    for number in range(lives):
        if number and odds.happens("moves", 0.12):
            slices, per_slice = rng.choice([s for s in SHAPES if s[0] * s[1] <= hosts])
            count = slices * per_slice
            members = _members(slices, per_slice)
            placed = tuple(rng.sample(range(hosts), count))
        elif number and odds.happens("moves", 0.15):
            members = _members(slices, per_slice, rng)
        if number and odds.happens("moves", 0.3):
            placed = tuple(rng.sample(range(hosts), count))
        if is_crowded and rng.random() < 0.5:
            placed = tuple(rng.choices(range(hosts), k=count))
        if number and stored_every and hosts > count and odds.happens("writers", 0.25):
            drawn[-1], placed = _draw_stall(rng, drawn[-1], hosts, count)
        drawn.append(_draw_life(rng, odds, members, placed, number=number, most_steps=most_steps))
    keep = 1 if rng.random() < 0.7 else 2
    if seed % _RETURNS == 1:
        drawn = _with_returns(random.Random(f"returns {seed}"), drawn)
    in_bucket = stored_every > 0 and seed % _BUCKETS in (2, 5)
    if seed % _NOTICES == 3:
        drawn = _with_notices(random.Random(f"notices {seed}"), drawn)
    if seed % _POLICIES == _POLICIES - 1:
        drawn = _with_policies(random.Random(f"policies {seed}"), drawn)
    if in_bucket:
        drawn = _with_stalled_changes(random.Random(f"bucket {seed}"), drawn)
    return Plan(seed, hosts, placement, keep, stored_every, tuple(drawn), in_bucket)


def _with_policies(rng: random.Random, lives: list[Life]) -> list[Life]:
    drawn = list(lives)
    for number, life in enumerate(lives):
        if rng.random() < 0.7:
            drawn[number] = dataclasses.replace(
                life,
                announced=rng.choice(("continuous", "continuous", "seconds")),
                # Long enough for an announcement, which may come a second ahead.
                steps=life.steps + 8,
                step_s=rng.choice((0.3, 1.0)),
                heals=False,
            )
    return drawn


def _with_notices(rng: random.Random, lives: list[Life]) -> list[Life]:
    drawn = list(lives)
    for number, life in enumerate(lives):
        if rng.random() < 0.7:
            noticed = (rng.randrange(len(life.hosts)), rng.randint(1, life.steps))
            drawn[number] = dataclasses.replace(life, noticed=noticed, heals=False)
    return drawn


def _with_stalled_changes(rng: random.Random, lives: list[Life]) -> list[Life]:
    """Let writers stall between the requests of which one decides whose a step's place is."""
    drawn = list(lives)
    for number, life in enumerate(lives):
        if life.stalls and rng.random() < 0.7:
            process, _, _, seconds = life.stalls
            stalls = (process, rng.choice(("commit", "delete")), rng.randint(1, 8), seconds)
            drawn[number] = dataclasses.replace(life, stalls=stalls)
    return drawn


def _with_returns(rng: random.Random, lives: list[Life]) -> list[Life]:
    drawn: list[Life] = []
    for life in lives:
        changes: dict[str, Any] = {"forces": rng.random() < 0.3}
        if rng.random() < 0.3:
            changes |= {"again": rng.randint(1, 3), "again_back": rng.choice((0, 1, 1, 3))}
        if drawn and life.begins == "restore" and rng.random() < 0.4:
            changes |= {"begins": "back", "back": rng.choice((1, 1, 2, 4))}
        drawn.append(dataclasses.replace(life, **changes))
    return drawn


def _members(
    slices: int, per_slice: int, rng: random.Random | None = None
) -> tuple[tuple[int, ...], ...]:
    order = list(range(slices * per_slice))
    if rng is not None:
        rng.shuffle(order)
    return tuple(tuple(order[n * per_slice : (n + 1) * per_slice]) for n in range(slices))


def _draw_life(
    rng: random.Random,
    odds: _Odds,
    members: tuple[tuple[int, ...], ...],
    placed: tuple[int, ...],
    *,
    number: int,
    most_steps: int,
) -> Life:
    values: dict[str, Any] = {
        "steps": rng.randint(1, most_steps),
        "interval": rng.choice((1, 1, 2)),
        "step_s": rng.choice((0.02, 0.3, 2.0)),
        "waits": rng.random() < 0.3,
        "stay": rng.choice((0.0, 0.0, 0.7, 0.95)),
        "service_slow_s": rng.choice((0.01, 0.01, 0.2, 3.0)),
    }
    if number:
        _draw_rest(rng, odds, placed, members, values)
    _draw_end(rng, odds, members, values)
    _draw_trouble(rng, odds, len(placed), values)
    _draw_clocks(rng, odds, placed, values)
    if odds.happens("begins", 0.1):
        values["begins"] = rng.choice(("zero", "ahead"))
    return Life(members, placed, **values)


def _draw_stall(
    rng: random.Random, life: Life, hosts: int, count: int
) -> tuple[Life, tuple[int, ...]]:
    """Return ``life``, of which a process stalls, and where the next one is placed: elsewhere."""
    process = 0 if rng.random() < 0.7 else rng.randrange(len(life.hosts))
    what = rng.choice(("call", "create"))
    number = rng.randint(1, 4) if what == "create" else int(rng.random() ** 2 * 150) + 1
    seconds = rng.choice((0.1, 1.0, 5.0, 30.0)) * (0.5 + rng.random())
    none: dict[str, Any] = {"killed_at_call": (), "killed_in_step": (), "killed_all_after_s": 0.0}
    stalled = dataclasses.replace(
        life, **none, ends_well=False, heals=False, stalls=(process, what, number, seconds)
    )
    others = [host for host in range(hosts) if host != life.hosts[process]]
    return stalled, tuple(rng.sample(others, count))


def _draw_end(
    rng: random.Random, odds: _Odds, members: tuple[tuple[int, ...], ...], values: dict[str, Any]
) -> None:
    """Draw who is killed, when, or how the life ends without."""
    count = sum(len(each) for each in members)
    steps = values["steps"]
    if odds.happens("kills", 0.45):
        who = rng.sample(range(count), rng.choice((1, 1, 1, 2)) if count > 1 else 1)
        if rng.random() < 0.5:
            values["killed_at_call"] = tuple((p, int(rng.random() ** 2 * 900) + 1) for p in who)
        else:
            values["killed_in_step"] = tuple(
                (p, rng.randint(1, steps), int(rng.random() ** 2 * 150) + 1) for p in who
            )
        values["takes_others"] = rng.random() < 0.4
        values["noticed_after_s"] = rng.choice((0.0, 0.05, 1.0, 20.0))
    elif odds.happens("ends", 0.36):
        values["killed_all_after_s"] = rng.random() * steps * values["step_s"] * 1.5 + 0.05
    else:
        values["ends_well"] = rng.random() < 0.6
        values["heals"] = rng.random() < 0.5
        return
    if rng.random() < 0.4:
        values["killed_together"] = rng.choice(members)


def _draw_trouble(rng: random.Random, odds: _Odds, count: int, values: dict[str, Any]) -> None:
    """Draw what fails during a life."""
    if odds.happens("network", 0.15):
        values["network_faults"] = rng.choice((0.002, 0.02, 0.1))
    elif odds.happens("service", 0.1):
        values["service_lost"] = rng.choice((0.001, 0.01))
    elif odds.happens("service", 0.2):
        length_s = values["steps"] * values["step_s"]
        begin_s, last_s = rng.random() * length_s, rng.choice((0.3, 1.0)) * length_s + 1.0
        who = rng.sample(range(count), rng.randint(1, count))
        values["outages"] = tuple((p, begin_s, last_s) for p in who)
    elif odds.happens("full", 0.08):
        values["full"] = (rng.randrange(count),)
    values["storage_slow_s"] = rng.choice((0.01, 0.01, 0.5, 4.0))
    if odds.happens("storage", 0.2):
        values["storage_faults"] = rng.choice((0.005, 0.05))
    elif odds.happens("storage", 0.05):
        values["storage_gone"] = True
    if odds.happens("listings", 0.1):
        values["listing_late_s"] = rng.choice((3.0, 30.0))
    if odds.happens("creates", 0.1):
        values["creates_unheard"] = rng.choice((0.1, 0.5))


def _draw_rest(
    rng: random.Random,
    odds: _Odds,
    placed: tuple[int, ...],
    members: tuple[tuple[int, ...], ...],
    values: dict[str, Any],
) -> None:
    """Draw what happens to RAM before a life."""
    if odds.happens("losses", 0.5):
        kind = rng.random()
        if kind < 0.1:
            lost = placed
        elif kind < 0.5:
            lost = (rng.choice(placed),)
        elif kind < 0.8:
            lost = tuple(placed[p] for p in rng.choice(members))
        else:
            lost = tuple(rng.sample(placed, min(2, len(placed))))
        values["wiped"] = tuple(dict.fromkeys(lost))
    if odds.happens("flips", 0.25):
        times = rng.choice((1, 3))
        values["flips"] = tuple((rng.choice(placed), rng.random()) for _ in range(times))


def _draw_clocks(
    rng: random.Random, odds: _Odds, placed: tuple[int, ...], values: dict[str, Any]
) -> None:
    """Draw jumps of wall clocks, up to a day either way; a clock may also be set right again."""

    def ahead_s() -> float:
        return rng.choice((0.0, -DAY_S, -5.0, 5.0, DAY_S, rng.uniform(-DAY_S, DAY_S)))

    if odds.happens("clocks", 0.25):
        who = placed if rng.random() < 0.5 else (placed[0],)
        values["clocks"] = tuple((host, ahead_s()) for host in dict.fromkeys(who))
    if odds.happens("clocks", 0.15):
        length_s = values["steps"] * values["step_s"]
        values["clock_jumps"] = ((rng.choice(placed), rng.random() * length_s, ahead_s()),)


def smaller(plan: Plan) -> Iterator[Plan]:
    """Yield plans with less in them than ``plan``, those that leave out most first."""
    lives = plan.lives
    for number in range(1, len(lives)):
        yield dataclasses.replace(plan, lives=lives[:number])
    for number in range(len(lives) - 1):
        yield dataclasses.replace(plan, lives=lives[:number] + lives[number + 1 :])
    plain = Life(((0,),), (0,))
    kept = {"slices", "hosts"}
    for number, life in enumerate(lives):
        for field in dataclasses.fields(Life):
            value = getattr(plain, field.name)
            if field.name in kept or getattr(life, field.name) == value:
                continue
            changed = dataclasses.replace(life, **{field.name: value})
            yield dataclasses.replace(plan, lives=(*lives[:number], changed, *lives[number + 1 :]))


def encoded(plan: Plan) -> str:
    """Return ``plan`` as JSON, without what has its default."""
    plain = Life(((0,),), (0,))
    lives = [
        {
            field.name: getattr(life, field.name)
            for field in dataclasses.fields(Life)
            if field.name in ("slices", "hosts")
            or getattr(life, field.name) != getattr(plain, field.name)
        }
        for life in plan.lives
    ]
    return json.dumps({**dataclasses.asdict(plan), "lives": lives}, indent=1) + "\n"


def decoded(text: str) -> Plan:
    """Return the plan of a JSON text that ``encoded`` made."""
    values: dict[str, Any] = json.loads(text)
    lives = [
        Life(**{name: _as_tuples(value) for name, value in each.items()})
        for each in values.pop("lives")
    ]
    return Plan(**values, lives=tuple(lives))


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(each) for each in value) if isinstance(value, list) else value
