"""Times faults to their end: until the launcher has exited and no process of the run is left.

    python -m benchmarks.fault_times --rounds 3

Two ranks train on this machine, under horovodrun on Gloo and on MPI. Where the fault is made from
outside, the clock begins with it; where a rank makes or meets it, with the first line that speaks
of it (an image: with the first epoch; train.max_time: when so much time has passed since the
header, which stands there about a second after the run began). Figures are medians and the longest.
Needs root, for a disk that is full.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from disks import small_disk
from launching import ROOT, environment
from pictures import write_images
from ranks import MARK, rank_processes, say, send, wait_until_gone

OWN = ROOT / "tests/support/own_faults"
ACTS = "+callbacks.acts={_target_: stuck.Acts, rank: 1, step: 60, what: %s}"
STOPPED_SECONDS = 8
MAX_SECONDS = 30
Strike = Callable[[subprocess.Popen[str], dict[int, int]], object]


@dataclass(frozen=True)
class Case:
    """A fault, made from outside by strike, or by a rank.

    Attributes:
        overrides: Settings of the run; {folder} is replaced.
        strike: Makes the fault; gets the launcher's process, and the ranks' by rank.
        text: Without strike, the clock begins when the output holds this text.
        code: The exit code that must follow; None: any.
        expected_seconds: Taken off the time: how long the run waits on purpose.
        disk: The run folder's size, as mount takes it.
    """

    overrides: list[str] = field(default_factory=list)
    strike: Strike | None = None
    text: str = "Error"
    code: int | None = 75
    expected_seconds: float = 0
    disk: str = ""


def kill_rank(rank: int, number: signal.Signals) -> Strike:
    return lambda process, ranks: send(ranks[rank], number)


def kill_launcher(number: signal.Signals) -> Strike:
    return lambda process, ranks: send(process.pid, number)


IMAGES = [
    "model=mlp",
    "train.batch_size=8",
    "dataset=image_folder",
    "dataset.image_shape=[6,6,1]",
    "dataset.dir={folder}",
]
CASES = {
    "kill -9 of rank 0": Case(strike=kill_rank(0, signal.SIGKILL)),
    "kill -9 of rank 1": Case(strike=kill_rank(1, signal.SIGKILL)),
    "kill -9 of the launcher": Case(strike=kill_launcher(signal.SIGKILL), code=None),
    "SIGTERM to the launcher": Case(strike=kill_launcher(signal.SIGTERM)),
    "SIGTERM to rank 1": Case(strike=kill_rank(1, signal.SIGTERM)),
    "SIGSTOP of rank 1, after abort_seconds": Case(
        [f"watchdog.abort_seconds={STOPPED_SECONDS}"],
        kill_rank(1, signal.SIGSTOP),
        expected_seconds=STOPPED_SECONDS,
    ),
    "train.max_time": Case(
        [f"train.max_time={MAX_SECONDS}s"],
        text="run folder",
        code=0,
        expected_seconds=MAX_SECONDS,
    ),
    "exception on rank 1": Case([ACTS % "raise"], code=1),
    "no memory on rank 1": Case([ACTS % "memory"], code=1),
    "disk full": Case(["checkpoint.keep=9"], text="No space left", code=2, disk="size=1600k"),
    "unreadable image": Case(IMAGES, text="run folder", code=2),
}


def seconds(launcher: str, name: str, folder: Path, mark: str) -> float:
    """Runs a case once.

    Args:
        launcher: gloo or mpi.
        name: Of the case.
        folder: Empty.
        mark: Finds all processes of the run.

    Raises:
        SystemExit: The run ended otherwise than it should. The message has its output.
    """
    case = CASES[name]
    # The file is cut off, as after an interrupted copy.
    if case.overrides is IMAGES:
        cut_image = write_images(folder / "train", 64)[41]
        cut_image.write_bytes(cut_image.read_bytes()[:40])

    overrides = [text.replace("{folder}", str(folder)) for text in case.overrides]
    line = [
        "horovodrun",
        f"--{launcher}",
        "-np",
        "2",
        "python",
        "-m",
        "hvtrain",
        "--config-dir",
        str(OWN / "conf"),
    ]
    output = folder / "output.txt"

    # A full disk needs a small one, with the run folder on it.
    with small_disk(folder / "run", case.disk) if case.disk else nullcontext():
        process = subprocess.Popen(
            [*line, "train.epochs=400", f"run.dir={folder / 'run'}", *overrides],
            cwd=folder,
            env=environment(**{MARK: mark, "PYTHONPATH": f"{ROOT}:{OWN}"}),
            stdin=subprocess.DEVNULL,
            stdout=output.open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

        def wait_for(condition: Callable[[], object]) -> None:
            while not condition() and process.poll() is None:
                time.sleep(0.02)

        if case.strike:
            # In the middle of the training, after a checkpoint.
            wait_for((folder / "run" / "checkpoints" / "step-00000044").exists)
            ranks = rank_processes(mark)
            if len(ranks) < 2:
                raise SystemExit(
                    f"{name} on {launcher}: over before its time\n{output.read_text()}"
                )

            began = time.monotonic()
            case.strike(process, ranks)
        else:
            wait_for(lambda: case.text in output.read_text())
            began = time.monotonic()

        code = process.wait(120)
        # The launcher may be gone before its ranks.
        left = wait_until_gone(mark, 60)
        duration = time.monotonic() - began - case.expected_seconds

    if left or case.code not in (None, code):
        raise SystemExit(f"{name} on {launcher}: code {code}, left {left}\n{output.read_text()}")
    return duration


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("cases", nargs="*", help=f"default: all of {', '.join(CASES)}")
    options = parser.parse_args()
    for unknown in set(options.cases) - set(CASES):
        parser.error(f"{unknown!r} is not one of {', '.join(CASES)}")

    say(f"{'case':<40} {'Gloo s':>14} {'MPI s':>14}   (median, longest of {options.rounds})")
    with tempfile.TemporaryDirectory(prefix="hvtrain-times-") as name:
        for case in options.cases or CASES:
            columns = []
            for launcher in ("gloo", "mpi"):
                durations = []
                for number in range(options.rounds):
                    folder = Path(name) / f"{case} {launcher} {number}".replace(" ", "-").replace(
                        ",", ""
                    )
                    # A new folder each time: nothing is resumed.
                    folder.mkdir()
                    durations.append(
                        seconds(launcher, case, folder, f"times-{os.getpid()}-{folder.name}")
                    )
                columns.append(f"{statistics.median(durations):.1f}, {max(durations):.1f}")

            say(f"{case:<40} {columns[0]:>14} {columns[1]:>14}")


if __name__ == "__main__":
    main()
