"""Kills random ranks at random moments, resumes each time, and compares the end with an uninterrupted run.

    python -m benchmarks.soak --kills 200
    python -m benchmarks.soak --kills 20 strategy=diloco strategy.every=3 strategy.compression=int8

Every start is the same command with the same run.dir. After each kill all ranks are gone, no shared
memory is left, and the exit code says that a restart helps. At the end all arrays of the last
checkpoint (weights, slots, step, rate, seeds of both ranks) and the metrics of history.csv are
those of a run that nobody touched.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from hvtrain.launch.child import ends_within
from launching import environment
from ranks import MARK, left_files, rank_processes, say, send, wait_until_gone

# Columns of history.csv that are measured.
MEASURED = ("seconds", "examples_per_second", "flops_per_second", "share_of_peak")
# Dropout, augmentation, Adam's slots, a schedule: all that a resume could lose. 20 steps an epoch
# on two ranks.
OVERRIDES = [
    "train.deterministic=true",
    "dataset.shift_pixels=1",
    "dataset.num_validation=100",
    "schedule=cosine",
    "checkpoint.every_steps=3",
]
LAUNCHERS = {
    "gloo": ["horovodrun", "--gloo", "-np", "2", sys.executable, "-m", "hvtrain"],
    "mpi": ["horovodrun", "--mpi", "-np", "2", sys.executable, "-m", "hvtrain"],
    "launch": [sys.executable, "-m", "hvtrain", "launch", "-np", "2", "--"],
}


def steps(run: Path) -> list[int]:
    """The steps of a run's checkpoints; empty before the first one."""
    return sorted(
        int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")
    )


def differences(run: Path, expected: Path) -> list[str]:
    """Arrays of the last checkpoints, and metrics of the epochs, that are not the same to the bit."""
    checkpoint, expected_checkpoint = (
        folder / "checkpoints" / f"step-{steps(folder)[-1]:08d}" for folder in (run, expected)
    )
    if checkpoint.name != expected_checkpoint.name:
        return [f"{checkpoint.name} against {expected_checkpoint.name}"]

    arrays = load_file(checkpoint / "state.safetensors")
    expected_arrays = load_file(expected_checkpoint / "state.safetensors")
    names = sorted({*arrays, *expected_arrays})
    # Missing on one side counts as different.
    different = [
        name for name in names if not np.array_equal(arrays.get(name), expected_arrays.get(name))
    ]
    if metrics(run) != metrics(expected):
        different.append("history.csv")
    return different


def metrics(run: Path) -> list[dict[str, str]]:
    """The rows of history.csv without the columns of time."""
    with (run / "history.csv").open(newline="") as file:
        return [
            {name: cell for name, cell in row.items() if name not in MEASURED}
            for row in csv.DictReader(file)
        ]


class Soak:
    """Kills ranks until enough are killed; SystemExit says what went wrong.

    Attributes:
        seconds: Of each kill, until nothing was left.
        num_starts: Of the command.
        num_runs: Runs that were killed.
    """

    def __init__(self, folder: Path, launchers: list[str], overrides: list[str], seed: int) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"  # TMPDIR of all starts.
        self.temporary.mkdir()
        self.launchers = launchers
        self.overrides = overrides
        self.random = random.Random(seed)
        self.seconds: list[float] = []
        self.num_starts = 0
        self.num_runs = 0

    def soak(self, kills: int) -> None:
        whole = self.folder / "uninterrupted"
        say("an uninterrupted run, to compare with")
        self.run_to_its_end(whole)

        while len(self.seconds) < kills:
            run = self.folder / f"round-{self.num_runs}"
            self.num_runs += 1
            while len(self.seconds) < kills and not (run / "result.json").exists():
                self.kill_once(run, kills)
            # Enough kills: the last run may go on to its end.
            if not (run / "result.json").exists():
                self.run_to_its_end(run)

            different = differences(run, whole)
            if different:
                raise SystemExit(
                    f"{run.name} ended with other bits in {len(different)} places: {different[:5]}"
                )
            say(f"{run.name}: the very bits of the uninterrupted run")

    def start(self, launcher: str, run: Path) -> tuple[subprocess.Popen[bytes], str, Path]:
        """Starts the command; returns its process, the mark of all processes of the run, and its log."""
        self.num_starts += 1
        mark = f"soak-{os.getpid()}-{self.num_starts}"
        log = self.folder / f"start-{self.num_starts:04d}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*LAUNCHERS[launcher], *OVERRIDES, *self.overrides, f"run.dir={run}"],
                cwd=self.folder,
                env=environment(**{MARK: mark, "TMPDIR": str(self.temporary)}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        return process, mark, log

    def run_to_its_end(self, run: Path) -> None:
        process, _, log = self.start(self.launchers[0], run)
        if process.wait(600):
            raise SystemExit(
                f"a run that nobody killed ended with {process.returncode}:\n{log.read_text()}"
            )

    def kill_once(self, run: Path, kills: int) -> None:
        """Starts the command and kills a rank at a random moment."""
        # Files of other programs are no problem of this run.
        old_files = left_files(self.temporary)
        launcher = self.random.choice(self.launchers)
        victim = self.random.randrange(2)
        # Mostly while it trains and saves, sometimes while it starts.
        is_early = self.random.random() < 0.25
        last_step = steps(run)[-1:]
        process, mark, log = self.start(launcher, run)
        began = time.monotonic()
        if is_early:
            ends_within(process, self.random.uniform(0.3, 8.0))
        else:
            while steps(run)[-1:] == last_step and time.monotonic() < began + 120:
                if ends_within(process, 0.02):
                    break
            ends_within(process, self.random.uniform(0.0, 2.0))

        # The run may be over, or the rank not there yet.
        ranks = rank_processes(mark)
        if process.poll() is not None or victim not in ranks:
            if process.wait(600):
                raise SystemExit(
                    f"{launcher} ended by itself with code {process.returncode}:\n{log.read_text()}"
                )
            return

        killed = time.monotonic()
        send(ranks[victim], signal.SIGKILL)
        if not ends_within(process, 60):
            os.killpg(process.pid, signal.SIGKILL)
            raise SystemExit(
                f"{launcher}: the launcher was still there 60 s after rank {victim} was killed:\n{log.read_text()}"
            )

        code = process.returncode
        processes_left = wait_until_gone(mark, 30)
        seconds = time.monotonic() - killed
        self.seconds.append(seconds)

        done = steps(run)
        where = f"step {done[-1]}" if done else "start"
        say(
            f"{len(self.seconds):>4}/{kills} {launcher:<6} rank {victim} after {killed - began:5.1f} s at {where}: "
            f"{seconds:4.1f} s, code {code}"
        )
        problems = []
        if processes_left:
            problems.append(f"left running: {processes_left}")

        files_left = self._files_left(old_files)
        if files_left:
            problems.append(f"left in shared memory or Open MPI's folders: {files_left}")

        output = log.read_text(errors="replace")
        # The run may have been over already when the kill came.
        if code != 75 and not (code == 0 and (run / "result.json").exists()):
            problems.append(f"exit code {code} instead of 75")
        elif code and f"rank {victim}" not in output.strip().rpartition("\n")[2]:
            problems.append(f"the last line does not name rank {victim}")

        if problems:
            raise SystemExit(f"{launcher}, rank {victim}: {'; '.join(problems)}\n{output}")

    def _files_left(self, before: set[str]) -> list[str]:
        """The files that the start left for good: those of another killed job go away in a moment."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and left_files(self.temporary) - before:
            time.sleep(0.1)
        return sorted(left_files(self.temporary) - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="SETTING=VALUE", help="settings of the runs"
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=60, help="of each run; 20 steps each")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS), help="any of: %(default)s")

    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of the choice of ranks and moments; default: a new one",
    )
    parser.add_argument("--keep", action="store_true", help="keep the runs and logs")
    options = parser.parse_args()
    # Printed, so that a soak can be repeated.
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="hvtrain-soak-"))
    say(f"seed {seed}, in {folder}")
    overrides = [f"train.epochs={options.epochs}", *options.overrides]
    soak = Soak(folder, options.launchers.split(","), overrides, seed)
    began = time.monotonic()
    try:
        soak.soak(options.kills)
    finally:
        if soak.seconds:
            say(
                f"{len(soak.seconds)} kills in {soak.num_runs} run(s), {time.monotonic() - began:,.0f} s; from the "
                f"kill until nothing was left: median {statistics.median(soak.seconds):.1f} s, "
                f"longest {max(soak.seconds):.1f} s"
            )

    # After a problem they stay.
    if not options.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
