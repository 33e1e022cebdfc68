"""Extras: what hangs on the extension points of the library and could be deleted with its tests.

An observer is given to ``on_event``, as its object or by its text:

- ``event_log``: each process keeps its events on disk (``"event_log(/logs/run7)"``).
- ``prometheus``, ``metrics``: numbers for Prometheus (``"prometheus(9400)"``), TensorBoard, Orbax's
  loggers and ``jax.monitoring``.
- ``hang``: ends a job that makes no step (``"hang(600)"``).
- ``progress``: steps for ``eckpt launch``, which asks for them.
- ``notices``: sources of preemption notices besides SIGTERM (``"notices(gce)"``).

A policy is given to its setting:

- ``pace``: ``AdaptiveInterval``, the interval of saves that loses the least time.
- ``striped``: placement with fewer copies of each shard (``placement="striped(2)"``).
"""
