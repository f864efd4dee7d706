"""Ranks for a notebook: `hvtrain.run_ranks` and the `%%ranks` cell start them through the launcher."""
