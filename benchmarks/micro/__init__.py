"""One part each: pages of a ramdisk, a transfer between hosts, device to host."""
