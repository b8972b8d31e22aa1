"""Entry point of ``python -m interlace``, the same as ``interlace``."""

import sys

from interlace.cli import main

sys.exit(main())
