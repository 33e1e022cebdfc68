"""The persistent tier: one sharded copy of a step in Orbax's format, with markers beside it.

``tier`` writes and reads a step, ``steps`` says which steps there are and
removes one or moves it aside. Only ``tier``, ``steps``, ``orbax_writer``
and ``orbax_reader`` use Orbax.

Guaranteed: a step that counts, or that cannot be read, is moved aside and never removed, but for
retention.
"""
