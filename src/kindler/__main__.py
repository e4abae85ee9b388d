"""`python -m kindler` is the `kindler` command."""

import sys

from kindler.cli import main

sys.exit(main())
