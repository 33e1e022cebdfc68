"""Directories of a ramdisk: who owns which, and which may be removed."""
