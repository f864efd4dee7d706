"""Horovod's own launcher, quicker and quieter: what `horovodrun` is in the environment that scripts/run makes.

Same command line, same launch. Three things differ. Horovod finds out what it was built with by importing
TensorFlow in child processes, some 10 seconds and a page of notes; the library's file tells it at once. A
failed rank ends in one line and in that rank's exit code, not in a traceback of the launcher. And mpirun's
banner about the failed rank, which buries what the rank said, is left out.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import horovod
from horovod.runner import launch


def main() -> None:
    """Runs horovodrun with this process's arguments; exits with the code of the first rank that failed."""
    library = b"".join(path.read_bytes() for path in (Path(horovod.__file__).parent / "tensorflow").glob("mpi_lib*.so"))
    launch.mpi_built = lambda verbose=False: b"MPI_Allreduce" in library
    launch.gloo_built = lambda verbose=False: b"GlooContext" in library
    os.environ.setdefault("OMPI_MCA_orte_execute_quiet", "1")
    if list((Path(sys.prefix) / "lib").glob("libmpi.so*")):
        # The environment's own Open MPI, which on other hosts would look for its parts where it was built.
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)
    try:
        launch.run_commandline()
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        text = str(error)
        name = re.search(r"Process name: (\S+)", text)
        code = re.search(r"[Ee]xit code:? (\d+)", text)
        if code is None:
            sys.exit(f"horovodrun: {' '.join(text.split())}")
        print(f"horovodrun: rank {name[1] if name else '?'} ended with exit code {code[1]}", file=sys.stderr)
        sys.exit(int(code[1]))
    except Exception as error:
        sys.exit(f"horovodrun: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
