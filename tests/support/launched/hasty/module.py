"""python module.py MODULE:NAME=SECONDS ... -- PROGRAM WORDS: the program with other limits of time.

NAME with a dot is a method, whose only default is meant. PROGRAM is what python -m takes, or MODULE:FUNCTION.
"""

import importlib
import runpy
import sys

end = sys.argv.index("--")
for setting in sys.argv[1:end]:
    target_name, _, seconds = setting.partition("=")
    module, _, name = target_name.partition(":")
    owner, _, method = name.rpartition(".")
    target = importlib.import_module(module)
    if owner:
        getattr(getattr(target, owner), method).__defaults__ = (float(seconds),)
    else:
        setattr(target, name, float(seconds))
sys.argv = sys.argv[end + 1 :]
module, _, function = sys.argv[0].partition(":")
if function:
    getattr(importlib.import_module(module), function)()
else:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
