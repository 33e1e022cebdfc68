"""The process of ``FakeGcs(process=True)``: options as JSON in, one line out.

The line is the URL, or the error.
"""

from __future__ import annotations

import sys

import msgspec

from fake_gcs.control import FakeGcsError
from fake_gcs.serving import ServeOptions, serve_in_foreground


def main() -> int:
    options = msgspec.json.decode(sys.argv[1], type=ServeOptions)
    try:
        serve_in_foreground(options, _announce)
    except FakeGcsError as error:
        _announce(str(error))
        return 1
    return 0


def _announce(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
