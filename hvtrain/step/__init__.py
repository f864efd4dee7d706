"""What is built into the graph of a step: time marks, and losses that are exact over ranks."""
