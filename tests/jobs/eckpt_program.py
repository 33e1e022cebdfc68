"""``eckpt`` with the arguments of this program."""

import signal
import sys

from emergency_ckpt.tools.cli.main import main

# Tests send it SIGINT, also those that a script runs with "&", which has the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
