"""Measured side by side: the runner, what a user would write by hand, and other ways to train on several processes."""
