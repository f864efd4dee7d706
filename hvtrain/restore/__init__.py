"""Which checkpoint a run continues from, on whichever host it is, and how all ranks get it."""
