"""Run a program as one host's process: ``python enter.py NAMESPACES_PREFIX HOSTS_FILE PROGRAM...``.

``benchmarks.dcn`` starts it for each process of a job. It enters the host's network namespace, sets
a host name that the hosts file resolves to the host's address (on which Gloo listens), replaces the
loopback by the coordinator's link as the coordinator's address, and runs the program.
"""

import os
import sys

from benchmarks.dcn.links import address

_COORDINATOR = "ECKPT_COORDINATOR_ADDRESS"
_BECOME = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def host_name(number: int) -> str:
    """Return the host's name in the hosts file."""
    return f"eckpt-host-{number}"


def main(prefix: str, hosts_file: str, program: list[str]) -> None:
    number = int(os.environ["ECKPT_PROCESS_INDEX"])
    port = os.environ[_COORDINATOR].rpartition(":")[2]
    os.environ[_COORDINATOR] = f"{address(0)}:{port}"
    enter = ["ip", "netns", "exec", f"{prefix}{number}", "unshare", "--mount", "--uts"]
    become = ["sh", "-c", _BECOME, "dcn-host", hosts_file, host_name(number), *program]
    os.execvp(enter[0], enter + become)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
