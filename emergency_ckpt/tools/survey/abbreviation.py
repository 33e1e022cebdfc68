"""Host states shortened for people: long texts, lists and dictionaries are cut."""

from __future__ import annotations

from typing import Any, cast

_TEXT_CHARS = 120
_ITEMS = 16
_DEPTH = 16


def abbreviated(value: Any, depth: int = 0) -> Any:
    """Return a JSON value of bounded size; a cut says how much was left out."""
    if depth >= _DEPTH and isinstance(value, dict | list):
        return "..."
    if isinstance(value, str) and len(value) > _TEXT_CHARS:
        return f"{value[:_TEXT_CHARS]}... ({len(value)} characters)"
    if isinstance(value, list):
        items = cast("list[Any]", value)
        short = [abbreviated(item, depth + 1) for item in items[:_ITEMS]]
        more = len(items) - _ITEMS
        return [*short, f"... ({more} more)"] if more > 0 else short
    if isinstance(value, dict):
        fields = list(cast("dict[str, Any]", value).items())
        kept = {key: abbreviated(item, depth + 1) for key, item in fields[:_ITEMS]}
        more = len(fields) - _ITEMS
        return {**kept, "...": f"({more} more)"} if more > 0 else kept
    return value
