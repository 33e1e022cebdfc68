"""``eckpt`` with the arguments of this program."""

import sys

from emergency_ckpt.tools.cli.main import main

sys.exit(main())
