"""The listing of names with prefix, delimiter, offsets and pages. Pure."""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fake_gcs.resources import GcsError, whole_number

PAGE_LIMIT = 1000  # the maximum of GCS, also for a larger maxResults

# Unsupported parameters that filter the names. They are refused, since a listing that ignores a
# filter makes a test pass for the wrong reason.
UNKNOWN_FILTERS = ("matchGlob", "softDeleted", "filter")


@dataclass(frozen=True, kw_only=True, slots=True)
class ListQuery:
    prefix: str = ""
    delimiter: str = ""
    start_offset: str = ""
    end_offset: str = ""
    include_trailing_delimiter: bool = False
    max_results: int = PAGE_LIMIT
    after: str = ""
    """The last name or prefix of the page before; empty for the first page."""

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> ListQuery:
        for name in UNKNOWN_FILTERS:
            if query.get(name, "false") not in ("", "false"):
                raise GcsError(400, "invalid", f"The fake server does not support {name}.")
        wanted = whole_number(query, "maxResults")
        token = query.get("pageToken", "")
        return cls(
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            start_offset=query.get("startOffset", ""),
            end_offset=query.get("endOffset", ""),
            include_trailing_delimiter=query.get("includeTrailingDelimiter") == "true",
            max_results=min(wanted, PAGE_LIMIT) if wanted else PAGE_LIMIT,
            after=decode_page_token(token) if token else "",
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
        if (folder or name) <= query.after:
            index = _skip(sorted_names, index, folder)
            continue
        if len(names) + len(prefixes) == query.max_results:
            last = max(names[-1:] + prefixes[-1:])
            return Page(names, prefixes, encode_page_token(last))
        if folder:
            prefixes.append(folder)
            if query.include_trailing_delimiter and name == folder:
                names.append(name)
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


def encode_page_token(last: str) -> str:
    return base64.urlsafe_b64encode(last.encode()).decode("ascii")


def decode_page_token(token: str) -> str:
    try:
        return base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError) as error:
        raise GcsError(400, "invalid", "Invalid pageToken.") from error
