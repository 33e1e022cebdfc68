"""A contract double of axlearn, for the tests of ``emergency_ckpt.axlearn`` alone.

axlearn cannot be installed from the package index. This is what its trainer and its checkpointers
promise each other, in words of our own: the names, the order of calls, and what is easy to get
wrong (the state is donated, specs have lists for shapes, the iterator moves on).
"""
