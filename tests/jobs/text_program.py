"""Runs the text that is its first argument, as ``python -c`` does, where a fork will do."""

import sys

exec(compile(sys.argv.pop(1), "<text>", "exec"))
