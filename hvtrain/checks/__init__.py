"""Checks of hosts, ranks, data sets and past runs: doctor, verify, inspect, replay, bisect, info."""
