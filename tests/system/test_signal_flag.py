"""A flag that a signal handler sets: threading.Event would wait there for a lock that its own thread holds."""

import subprocess
import sys

CODE = """
import faulthandler, signal, time
from hvtrain.system.console import SignalFlag

flag = SignalFlag()
assert not flag.wait(0.01) and not flag.is_set()
signal.signal(signal.SIGALRM, lambda *_: flag.set())
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
faulthandler.dump_traceback_later(20, exit=True)
end = time.monotonic() + 1
while time.monotonic() < end:
    flag.__init__()  # Not set any more, as before each wait.
    flag.wait(1e-5)
flag.wait(10)
print(flag.is_set())
"""


def test_a_handler_sets_it_whatever_it_interrupts():
    """With threading.Event this ends in a deadlock inside the handler, within the second."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
