"""The process of ``FakeGcs``."""

from __future__ import annotations

import asyncio
import sys

from fake_gcs.serving import serve

if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
