"""``python -m hyper_parallel.cli``."""

import sys

from hyper_parallel.cli import main

sys.exit(main())
