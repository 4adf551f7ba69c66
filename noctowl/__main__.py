"""`python -m noctowl` is the console script."""

import sys

from noctowl.cli import main

sys.exit(main())
