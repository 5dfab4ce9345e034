"""The load generator by its old name: `shmserve bench` with the same options, from a checkout whose package is not installed too."""

import sys

import bench_common  # noqa: F401  puts the checkout on the path

from shmserve.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
