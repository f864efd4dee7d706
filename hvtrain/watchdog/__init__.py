"""The ranks' watch: a rank that is lost, fails, or makes no progress is named on all of them, and all of them end.

A star of connections beside Horovod, so that it works while every main thread is blocked in a reduction: each rank
(`member`) says once a second where it stands (`progress`), rank 0 (`hub`) decides once for all (`judge`). What
travels is JSON after a proof (`wire`), on the address by which all hosts reach rank 0 (`meeting`).
"""

from hvtrain.watchdog.judge import Verdict
from hvtrain.watchdog.watch import Watch, start

__all__ = ["Verdict", "Watch", "start"]
