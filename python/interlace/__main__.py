"""``python -m interlace`` is ``interlace``."""

import sys

from interlace.cli import main

sys.exit(main())
