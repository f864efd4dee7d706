"""Tests of faults start ranks and hosts with the tools of tests/distributed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
