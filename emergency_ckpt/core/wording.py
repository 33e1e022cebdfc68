"""Numbers and lists as text for messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from emergency_ckpt.types import LOCAL, PERSISTENT

TIER_WORDS = {LOCAL: "RAM", PERSISTENT: "storage"}
"""Names of the tiers in messages to users."""
_SHORT_CHARS = 200


def printable(text: str) -> str:
    """Return ``text`` for one line of a terminal, with escapes for what is not printable.

    A name in a file or a bucket may contain a terminal's commands, or a newline and a line that
    looks like one of this program: ESC becomes ``\\x1b``.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def encodable(text: str) -> str:
    """Return ``text`` with the escapes of ``printable`` for what UTF-8 cannot encode.

    Such are the bytes of a file's name that are no UTF-8: byte 0xff becomes ``\\udcff``.
    """
    return text.encode(errors="backslashreplace").decode()


def valid_text(text: str, limit_chars: int) -> str:
    """Return ``text``, an error's for example, as a message to other processes can contain it.

    Lone surrogates, as in the name of a file that is not UTF-8, become escapes (``encodable``).
    The result has at most ``limit_chars``.
    """
    return encodable(text[:limit_chars])[:limit_chars]


def unexpected_text(error: BaseException) -> str:
    """Return the text of an error that this package did not expect, with the name of its type."""
    return f"unexpected {type(error).__name__}: {error}"


def size_text(size_bytes: int) -> str:
    """Return ``size_bytes`` in the largest unit that leaves a number of at least 1."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes} B"


def seconds_text(seconds: float) -> str:
    """Return ``seconds`` with three digits."""
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def count_text(count: int, one: str, many: str) -> str:
    """Return ``count`` with the noun for it: ``one`` for 1, else ``many``."""
    return f"{count} {one if count == 1 else many}"


def few(items: Iterable[object], at_most: int = 4) -> str:
    """Return the first items as text, and the number of further ones."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - at_most} more" if len(texts) > at_most else ""
    return ", ".join(texts[:at_most]) + more


def processes_text(processes: Collection[int], at_most: int = 8) -> str:
    """Return the word and the first processes, and the number of further ones."""
    return f"process{'es' if len(processes) > 1 else ''} {few(sorted(processes), at_most)}"


def short_text(value: object) -> str:
    """Return the beginning of a value that may come from a hostile file, for a message."""
    try:
        return str(value)[:_SHORT_CHARS]
    except ValueError:  # an integer beyond the interpreter's limit for printing
        return "a number too long to print"
