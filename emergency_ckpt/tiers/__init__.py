"""The two tiers: RAM of the hosts (``local``), and storage (``persistent``).

``ramdisk`` says which process owns which directory. ``storage`` reaches a file system or an object
store with deadlines. FORMAT.md specifies the bytes of both tiers.
"""
