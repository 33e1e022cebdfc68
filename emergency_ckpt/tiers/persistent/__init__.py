"""The persistent tier: one sharded copy of a step in Orbax's format, with markers beside it.

``tier`` writes and reads a step, ``step_records`` lists steps and what each is worth, and
``step_changes`` removes a step or moves it aside. Only ``tier``, ``step_records``, ``orbax_writer``
and ``orbax_reader`` use Orbax.

Guaranteed: a step that counts, or that cannot be read, is moved aside and never removed, but for
retention.
"""
