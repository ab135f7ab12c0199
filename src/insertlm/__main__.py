"""`python -m insertlm`, for places where the sources are on the path but the command is not installed."""

import sys

from insertlm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
