"""Benchmarks of single parts: ramdisk pages, transfer between hosts, device to host."""
