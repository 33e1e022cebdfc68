"""Extras: what hangs on the extension points of the library and could be deleted with its tests.

- ``pace``: ``AdaptiveInterval``, the interval of saves that loses the least time.
- ``striped``: placement with fewer copies of each shard (``placement="striped(2)"``).
"""
