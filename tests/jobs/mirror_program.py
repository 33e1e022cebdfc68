"""Prints what a program sees of its own process, as JSON: the same however it was started."""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import warnings
from typing import Any

logging.basicConfig(level=logging.INFO)  # before an import logs

# ruff: noqa: E402
import fsspec.config
import gcsfs
import jax
import numpy as np
import orbax.checkpoint  # noqa: F401 - what imports change is seen with it

import emergency_ckpt  # noqa: F401 - as above


def mirror() -> dict[str, Any]:
    return {
        "arguments": sys.argv,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "paths": sys.path,
        "main": [__name__, sys.modules["__main__"].__dict__ is globals(), __file__],
        "signals": {int(each): str(signal.getsignal(each)) for each in signal.valid_signals()},
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "threads": [each.name for each in threading.enumerate()],
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        "input": sys.stdin.read(),
        "streams": [
            (each.encoding, each.errors, each.line_buffering, each.write_through)
            for each in (sys.stdout, sys.stderr)
            if isinstance(each, io.TextIOWrapper)
        ],
        "mask": os.umask(0o022),
        "limits": [
            resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)
        ],
        "nice": os.nice(0),
        "jax": {name: str(value) for name, value in sorted(jax.config.values.items())},
        "bucket": [fsspec.config.conf, str(gcsfs.GCSFileSystem)],
        "handlers": [str(each) for each in logging.getLogger().handlers],
        "level": logging.getLogger().level,
        "warnings": [sys.warnoptions, [each for each in warnings.filters if each[0] == "error"]],
        "hooks": [sys.excepthook is sys.__excepthook__, threading.excepthook.__name__],
        "faults": faulthandler.is_enabled(),
        "directory": tempfile.gettempdir(),
        "devices": len(jax.devices()),
        "left": "spoiled" in sys.modules or hasattr(os, "spoiled"),
    }


def spoil() -> None:
    """Change what a process can, as far as a program of a test ever did."""
    os.environ["SPOILED"] = os.environ["FSSPEC_GCS_TOKEN"] = "spoiled"
    sys.modules["spoiled"] = sys.modules[__name__]
    os.spoiled = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.chdir("/")
    os.umask(0o077)
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("error")
    jax.config.update("jax_enable_x64", True)
    fsspec.config.conf["gs"] = {"token": "spoiled"}
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def draw() -> list[float]:
    generator = np.random.default_rng()
    return [random.random(), float(np.random.random()), generator.random()]


if __name__ == "__main__":
    programs = {each.__name__: each for each in (mirror, draw, spoil)}
    print(json.dumps(programs[sys.argv[1]]()))
