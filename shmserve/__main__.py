"""`python -m shmserve` is the command `shmserve`."""

import sys

from shmserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
