"""The study of continuous saving: its variants, and the orders for its processes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.common.job import Shape

OFF = "off"
LOCAL_EVERY, LOCAL_CONTINUOUS = "local-every", "local-continuous"
PERSISTENT_EVERY, PERSISTENT_CONTINUOUS = "persistent-every", "persistent-continuous"
BOTH_CONTINUOUS, ORBAX_CONTINUOUS = "both-continuous", "orbax-continuous"
VARIANTS = (
    *(OFF, LOCAL_EVERY, LOCAL_CONTINUOUS, PERSISTENT_EVERY, PERSISTENT_CONTINUOUS),
    *(BOTH_CONTINUOUS, ORBAX_CONTINUOUS),
)


@dataclasses.dataclass(frozen=True)
class Orders:
    """The orders for all processes of one run, as a JSON file."""

    variant: str
    shape: Shape
    every_n_steps: int
    minimum_interval_s: float
    warm_up_steps: int
    measured_steps: int
    device_s: float
    """Part of each step during which the host's cores are idle, as while an accelerator works."""
    persistent_dir: str
    results_dir: str
    training_cores: int | None = None
    """Number of cores, from the first, for training and XLA's threads; None: all cores."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> "Orders":
        fields: dict[str, Any] = json.loads(path.read_text())
        return cls(**(fields | {"shape": Shape(**fields["shape"])}))

    def result_path(self, process_index: int) -> Path:
        return Path(self.results_dir) / f"process_{process_index:05}.json"

    def settings(self, continuous_policy: Any) -> dict[str, Any]:
        """Return the settings of our checkpointer for this variant; other tiers are off.

        KeyError for a variant of another checkpointer.
        """
        return {
            OFF: {"local_save_every": 0, "save_every": 0},
            LOCAL_EVERY: {
                "local_save_every": self.every_n_steps,
                "save_every": 0,
            },
            LOCAL_CONTINUOUS: {"local_save_every": continuous_policy, "save_every": 0},
            PERSISTENT_EVERY: {
                "local_save_every": 0,
                "save_every": self.every_n_steps,
            },
            PERSISTENT_CONTINUOUS: {
                "local_save_every": 0,
                "save_every": continuous_policy,
            },
            BOTH_CONTINUOUS: {
                "local_save_every": continuous_policy,
                "save_every": continuous_policy,
            },
        }[self.variant]
