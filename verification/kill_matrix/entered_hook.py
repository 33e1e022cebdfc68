"""Note which functions of the product a test file enters, in this process and its children.

A ``.pth`` file of the matrix's interpreter imports this. Where ``KILL_MATRIX_ENTERED`` names a
file, each function appends one line to it, once a process and test file, behind the test file that
``KILL_MATRIX_FILE`` names.
"""

import os
import sys
import threading

_seen = {}


def of_file(name: str) -> None:
    """Note from now on for the test file ``name``."""
    os.environ["KILL_MATRIX_FILE"] = name
    _seen.clear()


def start() -> None:
    """Begin to note, in this thread and those that start later."""
    path = os.environ.get("KILL_MATRIX_ENTERED")
    if not path:
        return
    root = os.environ["KILL_MATRIX_TREE"] + "/"
    product = root + "emergency_ckpt/"

    def note(frame, _event, _argument):
        code = frame.f_code
        if id(code) in _seen:
            return
        if not code.co_filename.startswith(product):
            _seen[id(code)] = code
            return
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError:  # a test that has used up the descriptors: at the next call
            return
        function = f"{code.co_filename.removeprefix(root)}:{code.co_qualname}"
        os.write(file, f"{os.environ.get('KILL_MATRIX_FILE', '')}\t{function}\n".encode())
        os.close(file)
        _seen[id(code)] = code

    threading.settrace(note)  # told of calls alone, as it returns nothing
    sys.settrace(note)


start()
