"""Kills random ranks at random moments, resumes each time, and compares the end with an uninterrupted run.

    python -m benchmarks.soak --kills 200

Every start is the same command with the same run.dir. After each kill all ranks are gone, no shared memory is left, and
the exit code says that a restart helps. At the end all arrays of the last checkpoint (weights, slots, step, rate,
seeds of both ranks) and the metrics of history.csv are those of a run that nobody touched.
"""

from __future__ import annotations

import argparse
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

from launching import environment
from ranks import MARK, left_files, rank_processes, say, send, wait_until_gone

# Dropout, augmentation, Adam's slots, a schedule: all that a resume could lose. 20 steps an epoch on two ranks.
WORDS = [
    "train.deterministic=true",
    "dataset.shift_pixels=1",
    "dataset.num_validation=100",
    "schedule=cosine",
    "checkpoint.every_steps=3",
]
LAUNCHERS = {
    "gloo": ["horovodrun", "--gloo", "-np", "2"],
    "mpi": ["horovodrun", "--mpi", "-np", "2"],
    "launch": [sys.executable, "-m", "hvtrain", "launch", "-np", "2", "--"],
}


def command(launcher: str, epochs: int, run: Path) -> list[str]:
    words = [*WORDS, f"train.epochs={epochs}", f"run.dir={run}"]
    return [*LAUNCHERS[launcher], *([] if launcher == "launch" else [sys.executable, "-m", "hvtrain"]), *words]


def temporary(folder: Path) -> Path:
    """TMPDIR of the soak's starts."""
    (folder / "tmp").mkdir(exist_ok=True)
    return folder / "tmp"


def start(launcher: str, epochs: int, run: Path, mark: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command(launcher, epochs, run),
            cwd=run.parent,
            env=environment(**{MARK: mark, "TMPDIR": str(temporary(run.parent))}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def differences(ours: Path, theirs: Path) -> list[str]:
    """Arrays of the last checkpoints, and metrics of the epochs, that are not the same to the bit."""
    folders = [run / "checkpoints" / f"step-{steps(run)[-1]:08d}" for run in (ours, theirs)]
    if folders[0].name != folders[1].name:
        return [f"{folders[0].name} against {folders[1].name}"]
    mine, other = (load_file(folder / "state.safetensors") for folder in folders)
    found = [key for key in sorted({*mine, *other}) if not np.array_equal(mine.get(key), other.get(key))]
    # Without the columns of time.
    rows = [[r.split(",") for r in (run / "history.csv").read_text().splitlines()] for run in (ours, theirs)]
    if [[*r[:3], *r[5:]] for r in rows[0]] != [[*r[:3], *r[5:]] for r in rows[1]]:
        found.append("history.csv")
    return found


class Soak:
    """One soak in a folder; `kills` so far, and how long each took from the kill until nothing was left."""

    def __init__(self, folder: Path, launchers: list[str], epochs: int, seed: int) -> None:
        self.folder, self.launchers, self.epochs = folder, launchers, epochs
        self.random = random.Random(seed)
        self.seconds: list[float] = []
        self.starts = self.rounds = 0

    def soak(self, kills: int) -> list[str]:
        """What went wrong, in words; empty when nothing did."""
        whole = self.folder / "uninterrupted"
        say("an uninterrupted run, to compare with")
        began = time.monotonic()
        self.run_to_its_end(whole)
        self.span = time.monotonic() - began
        problems: list[str] = []
        while len(self.seconds) < kills and not problems:
            run = self.folder / f"round-{self.rounds}"
            self.rounds += 1
            while len(self.seconds) < kills and not problems and not (run / "result.json").exists():
                problems = self.kill_once(run, kills)
            if not problems and not (run / "result.json").exists():
                self.run_to_its_end(run)
            if not problems:
                found = differences(run, whole)
                problems = [f"{run.name} ended with other bits in {len(found)} places: {found[:5]}"] if found else []
                say(f"{run.name}: {'the very bits of the uninterrupted run' if not found else problems[0]}")
        return problems

    def run_to_its_end(self, run: Path) -> None:
        mark, log = self._next()
        process = start(self.launchers[0], self.epochs, run, mark, log)
        if process.wait(600):
            raise SystemExit(f"a run that nobody killed ended with {process.returncode}:\n{log.read_text()}")

    def kill_once(self, run: Path, kills: int) -> list[str]:
        """Starts the line, kills a rank at a random moment, and looks at what is left."""
        mark, log = self._next()
        files = left_files(temporary(self.folder))
        launcher = self.random.choice(self.launchers)
        victim = self.random.randrange(2)
        # Mostly while it trains and saves, sometimes while it starts.
        early = self.random.random() < 0.25
        before = steps(run)[-1:] if run.exists() else []
        process = start(launcher, self.epochs, run, mark, log)
        began = time.monotonic()
        if early:
            self._wait(process, self.random.uniform(0.3, 8.0), lambda: False)
        else:
            self._wait(process, 120.0, lambda: run.exists() and steps(run)[-1:] != before)
            self._wait(process, self.random.uniform(0.0, 2.0), lambda: False)
        ranks = rank_processes(mark)
        if process.poll() is not None or victim not in ranks:
            code = process.wait(600)
            return [] if code == 0 else [f"{launcher} ended by itself with code {code}:\n{log.read_text()}"]
        killed = time.monotonic()
        send(ranks[victim], signal.SIGKILL)
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return [f"{launcher}: the launcher was still there 60 s after rank {victim} was killed:\n{log.read_text()}"]
        left = wait_until_gone(mark, 30)
        took = time.monotonic() - killed
        self.seconds.append(took)
        done = steps(run)[-1:] if run.exists() else []
        where = f"step {done[0]}" if done else "start"
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        moment = f"after {killed - began:5.1f} s at {where}"
        say(f"{len(self.seconds):>4}/{kills} {launcher:<6} rank {victim} {moment}: {took:4.1f} s, code {code}")
        problems = [f"left running: {left}"] if left else []
        if files_left := self._files_left(files):
            problems.append(f"left in shared memory or Open MPI's folders: {files_left}")
        # The run may have been over already when the kill came.
        if code != 75 and not (code == 0 and (run / "result.json").exists()):
            problems.append(f"exit code {code} instead of 75")
        elif code and f"rank {victim}" not in last:
            problems.append(f"the last line does not name rank {victim}")
        return (
            [f"{launcher}, rank {victim}: {'; '.join(problems)}\n{log.read_text(errors='replace')}"] if problems else []
        )

    def _files_left(self, before: set[str]) -> list[str]:
        """What the start left for good: what another killed job left goes away in a moment."""
        deadline = time.monotonic() + 10
        while (left := left_files(temporary(self.folder)) - before) and time.monotonic() < deadline:
            time.sleep(0.1)
        return sorted(left)

    def _next(self) -> tuple[str, Path]:
        self.starts += 1
        return f"soak-{os.getpid()}-{self.starts}", self.folder / f"start-{self.starts:04d}.log"

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], timeout: float, until) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and process.poll() is None and not until():
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=60, help="of each run; 20 steps each")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS), help="any of: %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="of the choice of ranks and moments; default: a new one")
    parser.add_argument("--keep", action="store_true", help="keep the runs and logs")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="hvtrain-soak-"))
    say(f"seed {seed}, in {folder}")
    soak = Soak(folder, options.launchers.split(","), options.epochs, seed)
    began = time.monotonic()
    problems = soak.soak(options.kills)
    if soak.seconds:
        median, longest = statistics.median(soak.seconds), max(soak.seconds)
        say(
            f"{len(soak.seconds)} kills in {soak.rounds} run(s), {time.monotonic() - began:,.0f} s; from the kill "
            f"until nothing was left: median {median:.1f} s, longest {longest:.1f} s"
        )
    for problem in problems:
        say(problem)
    if not (problems or options.keep):
        shutil.rmtree(folder)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
