"""`python -m insertlm.cli`, the same as `insertlm`."""

import sys

from insertlm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
