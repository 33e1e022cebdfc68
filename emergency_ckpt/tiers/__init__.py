"""The two tiers: host RAM (``local``) and storage (``persistent``).

``ramdisk`` decides which process owns which directory of a ramdisk. ``storage`` calls a file system
or an object store with deadlines. FORMAT.md specifies the bytes of both tiers.
"""
