"""``eckpt launch`` with faults: processes are killed, and hosts lose their ramdisks.

``python -m examples.faults`` takes the options of ``eckpt launch`` and ``--fault``. The demo, the
notebook and the benchmarks of recoveries use ``injection.FaultySupervisor``.
"""
