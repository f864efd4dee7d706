"""This process and this host: console, cores, network interfaces, versions, the lock of a run folder. No ranks."""
