"""Measures what docs/ says about speed and faults; README.md lists the commands."""

import sys
from pathlib import Path

# Ranks, hosts and faults are started with the tests' own helpers.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
