"""The faults of find_faults.py: a line of the product, what it becomes, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT, NIGHTLY = "default", "nightly"

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
        "else:\n                values = self._reduce_group(tensors, name)",
        "else:\n                values = self._reduce_group(tensors, name) if number == 0 else tensors",
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
        "rows = gather_rows(gradient, name, self.process_set)",
        "rows = gradient",
        (f"{DROP_IN}::test_tapes_reduce_dense_and_sparse_gradients[mpi-2]",),
    ),
    Fault(
        "table-summed",
        "rows of sharded tables get the sum over the ranks instead of the mean",
        "keras/reduction.py",
        "reduced[i] = self._rescale(merge_rows(gradient), averages=self.op == hvd.Average)",
        "reduced[i] = self._rescale(merge_rows(gradient), averages=False)",
        (
            "tests/keras/test_sharded_embedding.py::test_training_equals_one_process_on_the_joint_batch[gloo-3-sgd]",
        ),
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
        "keras/callbacks.py",
        "broadcast_variables(shared, self.root_rank)",
        "pass",
        (f"{DROP_IN}::test_a_script_written_for_horovod_runs_with_one_line_changed[mpi-2]",),
    ),
    Fault(
        "batch-norm-alone",
        "SyncBatchNormalization takes the statistics of its own rank",
        "keras/over_ranks.py",
        "rows = _rows_of_all_ranks(tf.concat(moments, axis=0))",
        "rows = tf.concat(moments, axis=0)[tf.newaxis]",
        (
            "tests/keras/test_sync_batch_norm.py::test_training_equals_one_process_on_the_joint_batch[mpi-3]",
        ),
        NIGHTLY,
    ),
    Fault(
        "stop-dropped",
        "one rank's request to stop reaches no other",
        "keras/reduction.py",
        "done.append(flag.update(values.pop()))",
        "done.append(values.pop())",
        (f"{DROP_IN}::test_no_rank_stops_alone[mpi-2]",),
    ),
    Fault(
        "nan-applied",
        "a gradient that is not finite reaches the weights",
        "keras/hooks.py",
        "return check(own, reduced, loss_scale=loss_scale) if check else reduced",
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
        "_set_metric_state(model, self.comm.sum_arrays(local_state))",
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
        "keras.utils.set_random_seed((config.seed + rank) % 2**32)",
        "keras.utils.set_random_seed(config.seed % 2**32)",
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
        "config/make_plan.py",
        "learning_rate_factor(train, size * accumulate)",
        "learning_rate_factor(train, accumulate)",
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
        "if digest != expected:",
        'if expected == "nothing":',
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
        "training/find_checkpoint.py",
        "newest = max(self.candidates, key=lambda candidate: (candidate.step, -candidate.rank))",
        "newest = min(self.candidates, key=lambda candidate: (candidate.step, -candidate.rank))",
        ("tests/training/test_find_checkpoint.py::test_the_newest_of_all_hosts_travels_to_rank_0",),
    ),
    Fault(
        "seeds-forgotten",
        "a resumed run drops other units than one that was not stopped",
        "checkpoint/model_state.py",
        'variables = {f"seed/{index:04d}": variable for index, variable in enumerate(seeds_of(model))}',
        "variables = {}",
        (f"{CHECKPOINTS}::test_seeds_of_dropout_come_back",),
    ),
    Fault(
        "silence-unnamed",
        "the watchdog ends the run and does not name the rank that answers no more",
        "watchdog/progress.py",
        "culprits = self.culprits()",
        "culprits: list[RankState] = []",
        (
            "tests/watchdog/test_watchdog.py::test_a_rank_that_is_stopped_is_named_and_woken_for_its_stacks[1]",
        ),
    ),
    Fault(
        "no-code-75",
        "a scheduler is not told that starting again would help",
        "launch/first_failure.py",
        "code = RESTART_HELPS\n    signal_name",
        "code = end.code\n    signal_name",
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
        "if SECRET.search(name) and not _PLAIN.fullmatch(value):",
        "if False:",
        ("hvtrain/system/secrets.py",),
    ),
]
