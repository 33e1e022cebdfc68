"""The pages of formats, the golden files and the code say the same."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from golden_example import (
    SAVE,
    contents,
    host_state_document,
    ledger,
    log_version,
    slot_bytes,
    writer,
)
from places import GOLDEN

import emergency_ckpt
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.ram.manifest import decode_manifest, encode_contents, wrap_contents
from emergency_ckpt.ram.process_files import LEDGER_FILE
from emergency_ckpt.state import dtype_named, host_state
from emergency_ckpt.storage.log import decode_version, encode_version

MANIFEST = (GOLDEN / "manifest_v1.json").read_bytes()
SLOT = (GOLDEN / "slot_v1.bin").read_bytes()
DOCUMENT = (GOLDEN / "process_00003_of_00008_v1.json").read_bytes()
LEDGER = (GOLDEN / "ledger_v1.json").read_bytes()


def specification() -> str:
    package = Path(emergency_ckpt.__file__).parent
    pages = package / "ram" / "FORMAT.md", package / "FORMAT.md"
    return "".join(page.read_text("utf-8") for page in pages)


def test_code_writes_the_golden_bytes() -> None:
    assert wrap_contents(encode_contents(contents()), writer()) == MANIFEST
    assert slot_bytes() == SLOT
    assert host_state_document() == DOCUMENT


def test_code_reads_the_golden_bytes() -> None:
    manifest = decode_manifest(MANIFEST)
    assert manifest.contents == contents()
    assert manifest.writer == writer()
    assert manifest.encoded == encode_contents(contents())
    document = host_state.decode(DOCUMENT)
    assert (document.save, document.owner, document.count) == (SAVE, 3, 8)
    value = host_state.value_of(document.payload)
    assert value["iterator"] == {"position": 160, "seen": b"\x00\xff", "window": (1, 2.5)}
    assert value["best"] == -math.inf
    assert value["seed"] == 1 << 70
    assert value[1] == "a key that is not a string"
    assert value["table"].dtype == np.uint16
    assert value["table"].tolist() == [1, 2]


def test_code_writes_and_reads_the_golden_ledger() -> None:
    assert LEDGER_FILE.encode(ledger()) == LEDGER
    assert LEDGER_FILE.decode(LEDGER, "ledger.json") == ledger()


def test_worked_example_is_the_golden_one() -> None:
    blocks = re.findall(r"```(json|hexdump)\n(.*?)\n```", specification(), re.DOTALL)
    dumps = [text for kind, text in blocks if kind == "hexdump"]
    documents = [text.encode() for kind, text in blocks if kind == "json"]
    assert [bytes.fromhex("".join(line[6:] for line in dumps[0].splitlines()))] == [SLOT]
    assert documents == [MANIFEST, LEDGER, DOCUMENT]


def test_specification_shows_the_version_that_is_written() -> None:
    (example,) = re.findall(r"```json version\n(.*?)\n```", specification(), re.DOTALL)
    assert (GOLDEN / "log_version_v2.json").read_text("utf-8") == example
    assert encode_version(log_version()) == example.encode()
    version = decode_version(example.encode(), 14, "version")
    assert version == log_version()


def test_specification_is_at_most_300_lines() -> None:
    assert len(specification().splitlines()) <= 300


def test_specification_lists_the_dtypes() -> None:
    rows = re.findall(r"^\| (\d+) \| (`.*) \|$", specification(), re.MULTILINE)
    listed = {name: int(size) for size, row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == dict(DTYPE_ITEM_BYTES)


def test_sizes_of_dtypes_are_those_of_numpy() -> None:
    for name, size in DTYPE_ITEM_BYTES.items():
        assert dtype_named(name).itemsize == size, name
