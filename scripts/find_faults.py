"""Breaks one line of the product at a time, and checks that a test notices: do the tests hold what they promise?

    ./scripts/run python scripts/find_faults.py                        # all faults
    ./scripts/run python scripts/find_faults.py no-fsync no-checksum   # these two
    ./scripts/run python scripts/find_faults.py --list

Each fault of FAULTS is put into a copy of the tree, and the tests that must notice it run there. It counts as found if
one of them fails by itself. An error in a fixture does not count, because it would name another promise. The tests pass
without the faults, which is checked first: a test that cannot pass proves nothing.

Prints a table for tests/README.md, and exits with 1 if a fault was not found. Most of the time goes into the faults
that only real ranks show.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
DEFAULT, NIGHTLY = "default", "nightly"
# What pytest takes for each of them. A fault is not found in a run that leaves its test out.
MARKERS = {DEFAULT: "not nightly and not release", NIGHTLY: "nightly and not release"}
# A fault may make ranks wait for each other. The tests' own limit of time is 300 s each.
LONGEST_SECONDS = 900.0

DROP_IN = "tests/keras/test_drop_in.py"
STREAMS = "tests/data/test_data_streams.py"
CHECKPOINTS = "tests/checkpoint/test_store_and_writer.py"


@dataclass(frozen=True)
class Fault:
    """One line of hvtrain/ that is changed, and the tests that must notice.

    old occurs once in the file. harm: what a user would suffer. tests: the quickest that hold the promise.
    """

    name: str
    harm: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    tier: str = DEFAULT


FAULTS = [
    Fault(
        "one-group-reduced",
        "only the first group of gradients is reduced",
        "keras/reduction.py",
        'values = self._reduce_group(tensors, f"{self.name}_{number}")',
        'values = self._reduce_group(tensors, f"{self.name}_{number}") if number == 0 else tensors',
        (f"{DROP_IN}::test_groups_of_variables[mpi-2]",),
    ),
    Fault(
        "divided-twice",
        "mean gradients are divided by the number of ranks once more",
        "keras/reduction.py",
        '"postscale_factor": self.predivide_factor * self.scale,',
        '"postscale_factor": self.predivide_factor * self.scale / self.process_set.size(),',
        (f"{DROP_IN}::test_groups_of_variables[mpi-2]",),
    ),
    Fault(
        "sparse-unreduced",
        "sparse gradients stay on their rank",
        "keras/reduction.py",
        'reduced[i] = self._reduce_sparse(reduced[i], f"{self.name}_sparse_{i}")',
        "reduced[i] = reduced[i]",
        (f"{DROP_IN}::test_tapes_reduce_dense_and_sparse_gradients[mpi-2]",),
    ),
    Fault(
        "micro-steps-reduced",
        "accumulation reduces every micro-step too",
        "keras/hooks.py",
        "result = super()._step(grads, variables)",
        "result = super()._step(super()._reduce(grads, variables), variables)",
        (f"{DROP_IN}::test_all_ranks_skip_an_overflow_while_accumulating[mpi-2]",),
    ),
    Fault(
        "no-broadcast",
        "ranks begin with unlike weights",
        "keras/broadcast_callback.py",
        "broadcast_variables([shared[key] for key in shared if key not in self._local], self.root_rank)",
        "pass",
        (f"{DROP_IN}::test_a_script_written_for_horovod_runs_with_one_line_changed[mpi-2]",),
    ),
    Fault(
        "batch-norm-alone",
        "SyncBatchNormalization takes the statistics of its own rank",
        "keras/sync_batch_norm.py",
        "rows = _rows_of_all_ranks(tf.concat(local_moments(inputs, mask, axes), axis=0))",
        "rows = tf.concat(local_moments(inputs, mask, axes), axis=0)[tf.newaxis]",
        ("tests/keras/test_sync_batch_norm.py::test_training_equals_one_process_on_the_joint_batch[mpi-3]",),
        NIGHTLY,
    ),
    Fault(
        "stop-dropped",
        "the wish of one rank to stop reaches no other",
        "keras/reduction.py",
        "done.append(self.flag.update(values.pop()))",
        "done.append(values.pop())",
        (f"{DROP_IN}::test_no_rank_stops_alone[mpi-2]",),
    ),
    Fault(
        "nan-applied",
        "a gradient that is not finite reaches the weights",
        "keras/hooks.py",
        "return self._hvtrain.finite_check(own, reduced) if self._hvtrain.finite_check else reduced",
        "return reduced",
        (f"{DROP_IN}::test_a_gradient_that_is_not_finite_reaches_no_weight[mpi-2]",),
    ),
    Fault(
        "drift-unseen",
        "the check of weights between ranks always agrees",
        "keras/equality.py",
        "if np.array_equal(largest[0], -largest[1]):",
        "if True:",
        (f"{DROP_IN}::test_weights_that_drift_are_named[mpi-2]",),
    ),
    Fault(
        "mean-of-means",
        "metrics are averaged over ranks, whatever the sizes of their shards",
        "strategies/base.py",
        "_assign(model.metrics_variables, self.comm.sum_arrays(own))",
        "return {k: float(self.comm.sum_arrays([np.asarray(v)])[0]) / self.comm.topology.size"
        " for k, v in model.get_metrics_result().items()}",
        ("tests/keras/test_library.py::test_metrics_over_uneven_shards_equal_one_process[mpi-2]",),
    ),
    Fault(
        "shards-overlap",
        "every rank reads the shard of rank 0",
        "core/topology.py",
        "return range(first, num_items, period)",
        "return range(0, num_items, period)",
        (f"{STREAMS}::test_three_ranks_read_disjoint_shards_that_are_complete[arrays]",),
    ),
    Fault(
        "one-order",
        "all ranks shuffle their shards alike",
        "data/pipeline/streams.py",
        "seed=derive_seed(request.seed, ORDER, request.topology.rank, epoch)",
        "seed=derive_seed(request.seed, ORDER, 0, epoch)",
        (f"{STREAMS}::test_each_rank_has_an_order_of_its_own",),
    ),
    Fault(
        "epochs-alike",
        "every epoch has the order of the first",
        "data/pipeline/streams.py",
        "seed=derive_seed(request.seed, ORDER, request.topology.rank, epoch)",
        "seed=derive_seed(request.seed, ORDER, request.topology.rank, 0)",
        (f"{STREAMS}::test_the_order_depends_on_seed_epoch_and_rank[arrays]",),
    ),
    Fault(
        "dropout-alike",
        "dropout leaves out the same units on all ranks",
        "training/setup.py",
        "keras.utils.set_random_seed(config.seed + rank)",
        "keras.utils.set_random_seed(config.seed)",
        ("tests/training/test_setup.py::test_each_rank_drops_other_units",),
    ),
    Fault(
        "partial-batch-lost",
        "an evaluation leaves out the last, short batch",
        "data/pipeline/streams.py",
        ".batch(batch_size).enumerate()",
        ".batch(batch_size, drop_remainder=True).enumerate()",
        (f"{STREAMS}::test_evaluation_counts_each_of_ten_examples_once_over_three_ranks[arrays]",),
    ),
    Fault(
        "position-forgotten",
        "a resume in mid-epoch begins the epoch again",
        "data/pipeline/streams.py",
        ".skip(steps_done)",
        "",
        (f"{STREAMS}::test_start_step_gives_the_tail_of_the_uninterrupted_stream",),
    ),
    Fault(
        "rows-twice",
        "some rows of a Parquet file are read twice, others never",
        "data/sources/parquet.py",
        "random.permutation(num_rows)[low:high]",
        "random.integers(num_rows, size=num_rows)[low:high]",
        ("tests/data/test_data_parquet.py::test_row_groups_are_dealt_whole_and_all",),
    ),
    Fault(
        "padding-counted",
        "a short batch counts as much as a full one",
        "core/step_plan.py",
        "return self.size * (end - begin) / parts[-1][1]",
        "return 1.0",
        ("tests/core/test_step_plan.py::test_padded_epochs_use_every_example",),
    ),
    Fault(
        "rate-unscaled",
        "the learning rate does not grow with the number of ranks",
        "core/planning.py",
        "joint = size * train.accumulate",
        "joint = train.accumulate",
        ("tests/core/test_step_plan.py::test_learning_rate_scales",),
    ),
    Fault(
        "no-fsync",
        "a power cut leaves a checkpoint with its name but without its bytes",
        "checkpoint/writer.py",
        "    flush(path)\n",
        "    path\n",
        (f"{CHECKPOINTS}::test_a_checkpoint_is_on_the_disk_before_it_has_its_name",),
    ),
    Fault(
        "no-checksum",
        "a damaged checkpoint is taken for a good one",
        "checkpoint/store.py",
        "if found != listed:",
        "if not listed:",
        (f"{CHECKPOINTS}::test_any_damage_is_noticed[flip-state.safetensors]",),
    ),
    Fault(
        "newest-by-name",
        "after step 99,999,999 a run resumes from an older checkpoint, as they are sorted by name",
        "checkpoint/store.py",
        "for step in sorted(steps)",
        "for step in sorted(steps, key=folder_name)",
        (f"{CHECKPOINTS}::test_checkpoints_are_ordered_by_step",),
    ),
    Fault(
        "oldest-of-hosts",
        "of the checkpoints on several hosts, the oldest is resumed from",
        "restore/newest.py",
        "newest = max(self.candidates, key=lambda candidate: (candidate.step, -candidate.rank))",
        "newest = min(self.candidates, key=lambda candidate: (candidate.step, -candidate.rank))",
        ("tests/restore/test_newest.py::test_the_newest_of_all_hosts_travels_to_rank_0",),
    ),
    Fault(
        "seeds-forgotten",
        "a resumed run drops other units than one that was not stopped",
        "checkpoint/store.py",
        'found = {f"seed/{index:04d}": variable for index, variable in enumerate(seeds)}',
        "found = {}",
        (f"{CHECKPOINTS}::test_seeds_of_dropout_come_back",),
    ),
    Fault(
        "silence-unnamed",
        "the watchdog ends the run and does not name the rank that answers no more",
        "watchdog/judge.py",
        "if found := culprits(ranks, now, rules):",
        "if found := []:",
        ("tests/watchdog/test_watchdog.py::test_a_rank_that_is_stopped_is_named_and_woken_for_its_stacks[1]",),
    ),
    Fault(
        "no-code-75",
        "a scheduler is not told that starting again would help",
        "launch/first_failure.py",
        'return Failure(place, host, f"killed by {name}; {AGAIN}", RESTART_HELPS)',
        'return Failure(place, host, f"killed by {name}; {AGAIN}", end.code)',
        ("tests/launch/test_transcripts.py::test_the_end_of_a_launch",),
    ),
    Fault(
        "lock-shared",
        "two runs write into one folder",
        "system/run_lock.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        ("tests/system/test_run_lock.py::test_who_holds_it_is_named",),
    ),
    Fault(
        "secret-recorded",
        "a password among the settings is written into the run's records",
        "system/secrets.py",
        "sounds_secret = SECRET.search(name) and not _HARMLESS.search(name)",
        "sounds_secret = False",
        ("hvtrain/system/secrets.py",),
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Puts faults of one line each into a copy of the product, and checks that the tests find them.",
        epilog="Exits with 1 if a fault was not found, with 2 if its tests fail without it.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to try; default: all")
    parser.add_argument("--list", action="store_true", help="list the faults and the tests that must find them")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without the faults first")
    arguments = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"{', '.join(unknown)}: no such fault; --list names them all")
    faults = [known[name] for name in arguments.names] or FAULTS
    if arguments.list:
        for fault in faults:
            print(f"{fault.name:20} {fault.tier:8} hvtrain/{fault.file}: {fault.harm}")
            print("".join(f"    {test}\n" for test in fault.tests), end="")
        return
    with tempfile.TemporaryDirectory(prefix="hvtrain-faults-") as folder:
        copy = copy_of_the_tree(Path(folder) / "tree")
        check_that_it_fits(faults, copy)
        if not arguments.no_check:
            check_without_faults(faults, copy)
        results = [try_out(fault, copy) for fault in faults]
    print(table(results))
    sys.exit(0 if all(result.test for result in results) else 1)


@dataclass(frozen=True)
class Result:
    """test: the first one that failed; "" if none did."""

    fault: Fault
    test: str
    seconds: float


def copy_of_the_tree(copy: Path) -> Path:
    """Copies the files that git does not ignore, as they are now."""
    line = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(line, cwd=TREE, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (TREE / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TREE / name, copy / name, follow_symlinks=False)
    return copy


def environment(copy: Path) -> dict[str, str]:
    """The environment in which the copy is imported, and not the checkout that is installed."""
    paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def check_that_it_fits(faults: list[Fault], copy: Path) -> None:
    """Ends the program if a fault does not fit its file, or if the copy is not what tests import."""
    for fault in faults:
        times = (copy / "hvtrain" / fault.file).read_text().count(fault.old)
        if times != 1:
            sys.exit(f"{fault.name}: hvtrain/{fault.file} has {times} times, and needs once: {fault.old.strip()}")
    code = "import hvtrain; print(hvtrain.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=copy.parent, env=environment(copy), capture_output=True, text=True, check=True
    )
    if not Path(found.stdout.strip()).is_relative_to(copy):
        sys.exit(f"{found.stdout.strip()} is imported instead of the copy in {copy}")


def check_without_faults(faults: list[Fault], copy: Path) -> None:
    """Ends the program if one of the tests fails, or is left out, without any fault."""
    for tier, marker in MARKERS.items():
        tests = list(dict.fromkeys(test for fault in faults if fault.tier == tier for test in fault.tests))
        if not tests:
            continue
        began = time.monotonic()
        code, output = run_tests(tests, marker, copy)
        if code != 0:
            print(output)
            print(f"these tests of the {tier} run do not pass without a fault", file=sys.stderr)
            sys.exit(2)
        print(f"without a fault: {tier} tests pass in {time.monotonic() - began:.0f} s", flush=True)


def try_out(fault: Fault, copy: Path) -> Result:
    """Puts the fault into the copy, runs its tests there, and takes it out again."""
    path = copy / "hvtrain" / fault.file
    original, times = path.read_text(), path.stat()
    path.write_text(original.replace(fault.old, fault.new))
    began = time.monotonic()
    try:
        code, output = run_tests(fault.tests, MARKERS[fault.tier], copy)
    finally:
        path.write_text(original)
        # Python compiles a file again when its time differs from that of the compiled one.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    seconds = time.monotonic() - began
    failed = re.search(r"^FAILED (.+?)(?: - |$)", output, re.MULTILINE)
    test = failed[1] if failed and code == 1 else ""
    print(f"{fault.name}: {f'found by {test}' if test else 'NOT FOUND'} in {seconds:.0f} s", flush=True)
    if not test:
        print(output[-3000:], flush=True)
    return Result(fault, test, seconds)


def run_tests(tests: tuple[str, ...] | list[str], marker: str, copy: Path) -> tuple[int, str]:
    """Pytest's exit code and output; the code is -1 if the tests did not end."""
    line = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider", "-m", marker, *tests]
    process = subprocess.Popen(
        line,
        cwd=copy,
        env=environment(copy),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_SECONDS)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return -1, f"{process.communicate()[0]}\nthe tests did not end in {LONGEST_SECONDS:.0f} s"


def table(results: list[Result]) -> str:
    """The results in Markdown."""
    rows = ["| fault | in | found by | seconds | run |", "|---|---|---|---:|---|"]
    for result in results:
        fault = result.fault
        test = f"`{result.test}`" if result.test else "**not found**"
        rows.append(f"| {fault.harm} | `{fault.file}` | {test} | {result.seconds:.0f} | {fault.tier} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
