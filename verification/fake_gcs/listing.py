"""The listing of names with prefix, delimiter and pages. Pure."""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fake_gcs.resources import GcsError, whole_number

PAGE_LIMIT = 1000  # the maximum of GCS, also for a larger maxResults

KNOWN = frozenset(
    {
        *("prefix", "delimiter", "startOffset", "endOffset", "maxResults", "pageToken"),
        "includeFoldersAsPrefixes",
    }
)
# What changes no name. Other parameters are refused: a listing that ignores a filter makes a test
# pass for the wrong reason.
_NO_FILTERS = frozenset({"fields", "projection", "userProject", "prettyPrint", "versions", "alt"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ListQuery:
    prefix: str = ""
    delimiter: str = ""
    start_offset: str = ""
    end_offset: str = ""
    max_results: int = PAGE_LIMIT
    with_folders: bool = False
    """Folders of a hierarchical bucket are among the prefixes, also those without objects."""
    after: str = ""
    """The last name or prefix of the page before; empty for the first page."""

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> ListQuery:
        given = {name for name, value in query.items() if value not in ("", "false")}
        if unknown := given - KNOWN - _NO_FILTERS:
            raise GcsError(400, "invalid", f"The fake server does not support {unknown}.")
        wanted = whole_number(query, "maxResults")
        token = query.get("pageToken", "")
        return cls(
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            start_offset=query.get("startOffset", ""),
            end_offset=query.get("endOffset", ""),
            max_results=min(wanted, PAGE_LIMIT) if wanted else PAGE_LIMIT,
            with_folders=query.get("includeFoldersAsPrefixes", "false") == "true",
            after=base64.urlsafe_b64decode(token).decode(),
        )


@dataclass(frozen=True, slots=True)
class Page:
    names: list[str]
    prefixes: list[str]
    next_page_token: str | None


def list_page(sorted_names: Sequence[str], query: ListQuery) -> Page:
    """Return one page of ``sorted_names`` (ascending, unique). Names and prefixes count alike."""
    names: list[str] = []
    prefixes: list[str] = []
    index = bisect_left(sorted_names, max(query.prefix, query.start_offset, query.after))
    while index < len(sorted_names):
        name = sorted_names[index]
        if not name.startswith(query.prefix):
            break
        if query.end_offset and name >= query.end_offset:
            break
        cut = name.find(query.delimiter, len(query.prefix)) if query.delimiter else -1
        folder = "" if cut < 0 else name[: cut + len(query.delimiter)]
        if (folder or name) > query.after:
            if len(names) + len(prefixes) == query.max_results:
                last = max(names[-1:] + prefixes[-1:])
                token = base64.urlsafe_b64encode(last.encode()).decode("ascii")
                return Page(names, prefixes, token)
            if folder:
                prefixes.append(folder)
            else:
                names.append(name)
        index = _skip(sorted_names, index, folder)
    return Page(names, prefixes, None)


def _skip(sorted_names: Sequence[str], index: int, folder: str) -> int:
    if not folder:
        return index + 1
    # chr(0x10FFFF) is the largest code point; only names that continue with it need the loop.
    index = max(index + 1, bisect_left(sorted_names, folder + chr(0x10FFFF), index))
    while index < len(sorted_names) and sorted_names[index].startswith(folder):
        index += 1
    return index
