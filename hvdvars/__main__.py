"""``python -m hvdvars``: the same as the ``hvdvars`` command."""

import sys

from hvdvars.cli import main

if __name__ == "__main__":
    sys.exit(main())
