"""Parts of a step's graph: time marks, and losses that are exact over ranks."""
