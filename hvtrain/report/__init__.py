"""The report of a run: a page about it, or a page that compares several runs."""
