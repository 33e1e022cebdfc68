"""Saves step 4 over another life's, and dies by SIGKILL at the change that it is told."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from persistent_steps import life, save_over

from emergency_ckpt.storage import PersistentTier


def die_at(event_name: str, end: str) -> None:
    """Before the first change of that kind to a path that ends so."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        paths = [os.fsdecode(a) for a in arguments if isinstance(a, str | bytes | os.PathLike)]
        if event == event_name and any(path.endswith(end) for path in paths):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    directory, event_name, end = sys.argv[1:]
    tier = PersistentTier(str(Path(directory)))
    die_at(event_name, end)
    save_over(tier, 4, 40, life(2))
