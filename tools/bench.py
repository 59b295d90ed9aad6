"""``memra-lowlevel bench`` from a checkout: ``python tools/bench.py [launch] [replay] …``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from memra_lowlevel.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
