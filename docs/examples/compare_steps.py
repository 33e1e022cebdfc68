"""Compare two steps in storage, leaf by leaf and bit for bit, on any machine.

python compare_steps.py /checkpoints/run7 1000 gs://bucket/run8 1000
"""

import sys

import jax
import numpy as np
import orbax.checkpoint as ocp


def leaves_of(directory, step):
    """Return the leaves of a step by path, as arrays of numpy."""
    handlers = {"state": ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(directory, item_handlers=handlers) as manager:
        tree = manager.item_metadata(step)["state"].tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        args = ocp.args.PyTreeRestore(restore_args=as_numpy)
        state = manager.restore(step, args=ocp.args.Composite(state=args))["state"]
    paths = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}


def differences(a, b):
    """Yield each leaf that differs, with the kind of its difference."""
    for path in sorted(a.keys() | b.keys()):
        if path not in a or path not in b:
            yield path, "only in one step"
        elif (a[path].dtype, a[path].shape) != (b[path].dtype, b[path].shape):
            yield path, f"{a[path].dtype}{a[path].shape} and {b[path].dtype}{b[path].shape}"
        elif a[path].tobytes() != b[path].tobytes():
            yield path, "other values"


if __name__ == "__main__":
    first, second = (leaves_of(sys.argv[i], int(sys.argv[i + 1])) for i in (1, 3))
    differing = list(differences(first, second))
    for path, kind in differing:
        print(f"{path}: {kind}")
    print(f"{len(differing)} of {len(first.keys() | second.keys())} leaves differ")
    sys.exit(1 if differing else 0)
