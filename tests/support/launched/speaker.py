"""python speaker.py TRANSCRIPT: a launcher that says what the recorded one said, and ends as it ended.

It passes for a rank too, so that whoever supervises it can ask it to save, as the recorded ranks were asked.
"""

import os
import signal
import sys
from pathlib import Path

DESCRIPTORS = {"both": 1, "stdout": 1, "stderr": 2}

head, _, body = Path(sys.argv[1]).read_text(encoding="utf-8").partition("\n\n")
code = int(head.partition("exit code: ")[2])
was_signalled = False
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
for line in body.splitlines():
    source, _, text = line.partition("|")
    if source in DESCRIPTORS:
        os.write(DESCRIPTORS[source], text.replace("\\r", "\r").encode() + b"\n")
    elif not was_signalled:
        was_signalled = True
        os.kill(os.getppid(), getattr(signal, source))
        signal.sigwait({signal.SIGUSR1})
    else:
        os.kill(os.getppid(), getattr(signal, source))
if code >= 0:
    os._exit(code)
if not was_signalled:
    os.kill(os.getpid(), -code)
signal.pause()  # Whoever was signalled twice ends it.
