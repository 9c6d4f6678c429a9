"""`python -m fusewright`: the command line."""

import sys

from fusewright.tools.cli import main

sys.exit(main())
