"""Checks of hosts and of ranks: doctor, verify, info."""
