"""The process behind ``FakeGcs(process=True)``: options as JSON in, the URL as one line out."""

from __future__ import annotations

import sys

import msgspec

from emergency_ckpt.testing.gcs.serving import ServeOptions, serve_in_foreground


def _announce(url: str) -> None:
    print(url, flush=True)


serve_in_foreground(
    msgspec.json.decode(sys.argv[1], type=ServeOptions), _announce, until_input_ends=True
)
