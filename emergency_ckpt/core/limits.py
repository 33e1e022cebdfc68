"""Bounds of names, numbers and documents that come from another process, a file or a bucket.

Each bound stands here once. The writer and every reader use it, so that what is saved can be read.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

# Names and numbers

MAX_INT: Final = (1 << 63) - 1
"""Largest number in a file or a frame."""
MAX_STEP: Final = MAX_INT
MAX_VERSION: Final = 10**12 - 1
"""Greatest number of a version of the step log."""
MAX_INCARNATION_NUMBER: Final = 10**12 - 1
"""Largest number of a life of the job: its name has twelve digits for it."""
MAX_PROCESSES: Final = 1_000_000
ProcessIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PROCESSES)]
"""Also a key of dicts that are decoded; see ``json_decoders``."""
MAX_LEAVES: Final = 1_000_000
MAX_ITEMS: Final = 256
"""Maximum for a step's items with arrays in storage."""
MAX_SHARDS: Final = 1_000_000
"""Maximum for one process."""
MAX_DIMENSIONS: Final = 32
"""Maximum for a leaf, and for an array in a host state."""
MAX_DEPTH: Final = 64
"""Maximum nesting of a host state and of metrics."""
MAX_LIVES: Final = 64
"""Maximum number of lives kept one by one in a timeline; older ones are merged."""
MAX_PATH_CHARS: Final = 4096
"""Maximum for a leaf's path."""
MAX_SETTING_CHARS: Final = 4096
"""Maximum for the text of a setting: PATH_MAX of Linux."""
MAX_NAME_CHARS: Final = 128
"""Maximum for a run id and for an incarnation."""
MAX_LABEL_CHARS: Final = 255
"""Maximum for a host name, a file name, and the name of a random key's implementation."""
MAX_ADDRESS_CHARS: Final = 300
"""Maximum for ``host:port``; a DNS name has at most 253 characters."""

PLAIN_NAME: Final = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
"""Run ids and incarnations: safe as one component of a path, and never a hidden file."""
NAME_PATTERN: Final = re.compile(PLAIN_NAME)

# Answers of a cloud

MAX_METADATA_BYTES: Final = 16 << 10
"""Maximum of a value of the metadata server."""

# Files of both tiers

MAX_SMALL_FILE_BYTES: Final = 4096
"""Maximum for the record of an owner."""
MAX_LEDGER_BYTES: Final = 64 << 10
"""Maximum for a process's record of its life, its timeline and its newest complete save."""
MAX_LOG_BYTES: Final = 64 << 20
"""Maximum for a version of the step log: some 400,000 steps."""
MAX_METRICS_BYTES: Final = 64 << 10
"""Maximum of a step, since each version of the step log has those of all steps."""
MAX_MARKER_BYTES: Final = 256 << 20
"""Maximum for a marker or the checksums of a step in storage, and so for any file read whole."""
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_HOST_STATE_BYTES: Final = 64 << 20
"""Maximum for an encoded host state, when it is saved and for every reader."""
MAX_HOST_STATE_CONTAINERS: Final = 1_000_000
"""Maximum number of lists and dicts in an encoded host state.

Each takes two bytes of a document, but some 60 bytes of memory and a microsecond to decode: without
this a document of 64 MiB could take half a minute.
"""
MAX_EQUAL_HASHES: Final = 64
"""Maximum number of keys of a dict in a host state that have one hash.

A dict looks at all keys of a hash one by one. Integers that differ by 2^61 - 1 have the same hash,
and 2 MiB of them took 15 s to decode.
"""
MIN_SECRET_BYTES: Final = 32
MAX_SECRET_BYTES: Final = 4096

# Directories of a ramdisk

SMALL_FILES_BYTES: Final = 1 << 20
"""Reserved for each process beside its slots: enough for the manifests and host states of a few
thousand shards.
"""
MAX_RUNS: Final = 1024
MAX_DIRECTORIES_PER_RUN: Final = 1024
MAX_HOST_STATE_SAVES: Final = 72
"""Above ``local_keep_last_n``, because host states stay as long as their tensors."""
MAX_HOST_STATE_DOCUMENTS: Final = 4096
MAX_DOCUMENTS_BYTES: Final = 16 * MAX_HOST_STATE_BYTES
"""Of all host states in a process directory."""
MAX_QUARANTINE_RECORDS: Final = 64
MAX_MOUNTS_CHARS: Final = 4 << 20
"""Maximum for the kernel's list of mounts."""
MAX_GROUP_FILE_BYTES: Final = 64 << 10
"""Maximum for what the kernel lists of a control group."""

# Values in the coordination service

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Maximum of a message whose size does not depend on the state or the number of processes."""
MAX_PLAN_MESSAGE_BYTES: Final = 256 << 20
"""Maximum of any message; its decoded objects take several times as much memory."""

MAX_REASON_BYTES: Final = 4000
"""Maximum for the reason that a process gives for its failure."""

# Frames between hosts

MAX_UNPROVEN: Final = 128
"""Maximum number of connections that have proved nothing yet."""
MAX_UNPROVEN_PER_ADDRESS: Final = 64
MAX_UNPROVEN_FRAME_BYTES: Final = 1 << 10
"""Maximum of a frame before the proof of the secret, on both sides."""
MAX_FRAME_BYTES: Final = 64 << 10
MAX_INVENTORY_BYTES: Final = 4 << 20
MAX_RANGES: Final = 1024
"""Maximum of one request: at most 50 bytes each, so a frame always holds them."""
MAX_MESSAGE_CHARS: Final = 1000
"""Maximum for the text of a ``Failure``."""

# Jobs on one machine, and studies of a placement

MAX_HOSTS: Final = 256
"""Maximum number of processes of a launched job, since they share one machine."""
MAX_LINE_BYTES: Final = 64 << 10
"""Maximum of a line of a program's output or of an event log."""
MAX_TIME_S: Final = 1e11
"""Latest time of an event."""
MAX_LOG_ENTRIES: Final = 100_000
"""Maximum number of directory entries in which logs of events are looked for."""
MAX_LOG_EVENTS: Final = 1_000_000
MAX_CORPUS_BYTES: Final = 4 << 20
"""Maximum for the text that the demonstration trains on."""
MAX_SLICES: Final = 256
MAX_LOST_HOSTS: Final = 64
"""A RAM tier is not meant for larger losses, and the exact counts grow with the square."""
