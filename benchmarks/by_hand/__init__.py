"""The same training by hand, one page for each way."""
