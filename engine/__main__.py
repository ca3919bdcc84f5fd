"""`python -m engine key=value ...`: see engine.cli. Workers import this module too, so importing it does nothing."""

import sys

from engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
