"""Fail where a word of a mechanism that this project gave up stands in code, tests or docs.

A word that stays behind means that a part of its mechanism does. ``CHANGELOG.md`` and
``verification/record.md`` say what was given up, and why: they may name it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAY_NAME_THEM = frozenset(
    {
        "CHANGELOG.md",
        "docs/reliability.md",
        "verification/record.md",
        "emergency_ckpt/config/settings.py",  # what to use in the place of settings that are gone
        "native/engine/crc32c_interleaved.h",  # the CPU's prefetch
        "verification/given_up_words.py",
    }
)
KILL_MATRIX = "verification/kill_matrix/"
"""Which defects went with their mechanisms, and the tests that found them before."""

WORDS = (
    r"prefetch(?!_buffer_size|\(2\))",  # a restore ahead of its call; not Grain's and tf.data's
    r"device_warnings|PEER_PROBE_TIMEOUT",
    r"ckpt\.remaps|position_remap|IteratorRemap|smallest_position",
    r"suspect_lives|takes_suspect|only_below",
    r"majority|on_divergence|outvoted|\bReplicasDiffer",
    r"hedg|too_slow(?!\])",  # second requests for reads that are slower than others
    r"keeps_finite|newest_finite|non_finite=.keep",  # a step kept because its values are finite
    r"PeerAbsent|PeerSigns|DeathWatch|peer_state|signs? of (life|death)",  # but for one sign
    r"(?<!RECEIVED_)preemption_notice\b|notice_sources|notice_rules|JaxNotices|request_preemption_save",
    r"keep_newer|follow_soon",  # a restore of an older step that hides newer ones at once
    r"set_aside|aside_folder|\bsteps? aside\b|moves? aside|bring_back|brought back|superseded",
    r"\bveto(es)?\b",  # a decision on a save by another process than the leader
    r"\blent\b|\blending\b|LentCount|\bLoan\b",  # slots lent to JAX
    # Signatures of files in RAM and in storage.
    r"NotSigned|NO_SIGNING|StepSign|SignedFile|restore\.unsigned|[\"'.]signed\b|\bsigned: bool",
    r"signatures? (of|where|in|on)\b",
    r"transfer_security|modes? of transfer|\bcrc\W{0,3}mode\b|\bmode \W?crc\b",  # one mode is left
    # The face of plain Orbax as an imitation of its manager, on our storage.
    r"BothTiersManager|plain_options|HostStateItems|without_saves\b|StepNames\b",
    # Steps that all processes accepted before they saved them; the leader announces such steps.
    r"step_agreement|save_?agreement|is_agreed|when_confirmed|skipped.dropped",
    # A secret that the processes agreed on by X25519, and sealed values in JAX's service.
    r"ForgedValue|SealedCoordinator|(seal|open)_value|Secret(Hello|Answer)|made-up secret costs",
)
"""Regular expressions, for any case of letters."""

_FILES = re.compile(r"\.(py|pyi|md|cc|h|yaml|yml|json|sh|txt|toml)$|(^|/)Makefile$")


def main() -> int:
    """Print each line with such a word; return 1 when there is one."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], check=True, capture_output=True, text=True
    )
    words = re.compile("|".join(WORDS), re.IGNORECASE)
    count = 0
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if (
            name in MAY_NAME_THEM
            or name.startswith(KILL_MATRIX)
            or not _FILES.search(name)
            or not path.is_file()
        ):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if found := words.search(line):
                print(f"{name}:{number}: {found.group()!r} was given up: {line.strip()[:100]}")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
