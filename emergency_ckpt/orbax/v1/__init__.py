# pyright: reportWildcardImportFromLibrary=false, reportUnusedImport=false
"""Orbax v1 (0.12.8), with a RAM tier below ``training.Checkpointer``: change the import."""

from orbax.checkpoint.experimental.v1 import *  # noqa: F403 - the whole of Orbax's names

import emergency_ckpt.orbax.v1.training  # noqa: F401 - it takes the place of Orbax's
