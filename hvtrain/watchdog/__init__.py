"""The watchdog: detects a rank that is lost, fails or makes no progress, names it on all ranks, and ends them.

It works independently of Horovod, even while every main thread is blocked in an all-reduce. Each rank
(`member`) usually reports its status once a second; rank 0 (`hub`) decides for all, by the rules in `progress`.
They exchange JSON after a proof of identity (`connections`), over an address of rank 0 that all
hosts can reach (`starting`).
"""

from hvtrain.watchdog.member import Watchdog
from hvtrain.watchdog.starting import start

__all__ = ["Watchdog", "start"]
