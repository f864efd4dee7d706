"""This process and this host: console, cores, memory, GPUs, versions, network interfaces, the lock on a run folder."""
