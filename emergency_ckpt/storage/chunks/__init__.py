"""Chunks of an uncompressed step on a file system, read straight from its files.

TensorStore reads a chunk into new memory and copies it into a new array; the copy into RAM is the
third. New memory costs more than all else of such a read. So a database's own library says where
its chunks lie (``index``), and ``file_reader`` reads them in pieces that stay in a core's cache.
"""
