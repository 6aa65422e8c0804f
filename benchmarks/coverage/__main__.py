"""`python -m benchmarks.coverage`."""

import sys

from benchmarks.coverage.run import main

sys.exit(main(sys.argv[1:]))
