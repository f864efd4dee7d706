"""The watchdog: names a rank that is lost, fails or makes no progress on all ranks, and ends them.

It works beside Horovod, so also while every main thread is blocked in a reduction. Each rank
(`member`) reports its status once a second; rank 0 (`hub`) decides for all (both in `progress`).
They exchange JSON after a proof of identity (`connections`), over an address of rank 0 that all
hosts reach (`starting`).
"""

from hvtrain.watchdog.member import Watchdog
from hvtrain.watchdog.starting import start

__all__ = ["Watchdog", "start"]
