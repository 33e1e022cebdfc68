"""Which steps Orbax's emergency manager has after saves at intervals: its rules, said plainly."""

from __future__ import annotations


def is_due(step: int, interval: int) -> bool:
    """For saves that begin at step 0, which is always saved."""
    return step % interval == 0


def all_steps(
    total: int,
    local: tuple[int, int],
    persistent: tuple[int, int | None],
    *,
    keep_period: int | None = None,
) -> list[int]:
    """After steps 0 to ``total`` - 1; (interval, steps kept) of each tier."""
    in_ram = [step for step in range(total) if is_due(step, local[0])]
    stored = [step for step in range(total) if is_due(step, persistent[0])]
    newest = stored if persistent[1] is None else stored[-persistent[1] :]
    spared = [step for step in stored if keep_period and step % keep_period == 0]
    return sorted({*in_ram[-local[1] :], *newest, *spared})
