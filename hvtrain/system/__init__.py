"""This process and this host: console, cores, memory, GPUs, versions, interfaces, the lock of a run folder."""
