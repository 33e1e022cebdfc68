"""The adaptive interval: saves as often as loses the least time, from measured stalls.

``local_save_every=AdaptiveInterval(mean_time_between_failures_s=...)``. Pure.
"""

from __future__ import annotations

import dataclasses
import math

from emergency_ckpt.core.save.timing import TierStatus


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveInterval:
    """Saves at the interval that loses the least time, from measured stalls.

    Frequent saves cost stalls; rare saves cost lost work at each failure. With a stall of
    ``d`` per save and a mean time between failures of ``M``, the work time between two saves that
    loses least is, to first order, ``sqrt(2 d M)`` (J. W. Young, "A first order approximation to
    the optimum checkpoint interval", CACM 17(9), 1974). For ``d < 2 M`` this is Daly's estimate of
    higher order (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", FGCS 22(3), 2006)::

        T = sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d

    and ``T = M`` otherwise. Here ``d`` is the stall of the training thread, since saves run in the
    background; the interval from start to start is ``T + d``. It is never so short that stalls take
    more than ``max_overhead`` of the time, nor shorter than a save takes until it is complete.

    Attributes:
      mean_time_between_failures_s: of the whole job, for failures of all kinds.
      max_overhead: maximum share of the time that training may be stalled, e.g. 0.01.
    """

    mean_time_between_failures_s: float
    max_overhead: float = 0.05
    words = "adaptively"

    def __post_init__(self) -> None:
        if not 0 < self.mean_time_between_failures_s < math.inf:
            raise ValueError("mean_time_between_failures_s must be a positive number of seconds")
        if not 0 < self.max_overhead < 1:
            raise ValueError("max_overhead must lie between 0 and 1")

    def interval_s(self, stall_s: float, save_s: float = 0.0) -> float:
        """Return the seconds from the start of one save to the start of the next."""
        best_s = daly_interval_s(stall_s, self.mean_time_between_failures_s)
        return max(best_s, stall_s / self.max_overhead, save_s)

    def due(self, status: TierStatus) -> bool:
        """As ``TimingRule``; the first save, which measures, is due at once."""
        if status.busy:
            return False
        return not status.has_saved or (
            status.since_last_s >= self.interval_s(status.stall_s, status.save_s)
        )


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval of higher order (2006, equation 37), from one save to the next.

    Daly gives the work between two saves; ``cost_s`` is added here, as an interval includes it.

    Args:
      cost_s: time that a save holds up training; finite, 0 or more.
      mtbf_s: mean time between failures of the whole job; finite, above 0.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s + cost_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
