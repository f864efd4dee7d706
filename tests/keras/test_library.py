"""Promises of hvtrain.keras, each seen on real ranks."""

import json

import pytest

from launching import WORKERS, run, run_worker
from tiers import with_nightly

pytestmark = pytest.mark.distributed


# One for each way through the wrapper: dense, sparse, clipped, averaged, scaled, accumulated, grouped, compressed, and
# optimizers that do a part of the step by themselves.
CASES = [
    "adam", "clipped", "ema", "schedule", "accumulation", "none_gradient", "sparse gradients", "mixed_float16",
    "passes_averaged", "buckets", "fp16_on_the_wire", "own_apply", "delegates", "multi", "divided_losses",
]  # fmt: skip
NIGHTLY_CASES = [
    "sgd", "momentum", "rmsprop", "adamw", "lamb", "lion", "clipnorm", "loss_scale_factor", "embedding_adam",
    "mixed_bfloat16", "accumulated_embedding", "passes_summed", "sparse_as_dense", "predivided", "grouped",
    "loss_scale_accumulated", "own_apply_gradients", "own_backend_step", "normalized", "divided_losses_sparse",
    "divided_losses_accumulated", "divided_losses_scaled", "lazy_embedding", "adagrad_embedding",
]  # fmt: skip


@pytest.fixture(scope="module")
def joint_batch(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("joint")
    cases = [*CASES, *(NIGHTLY_CASES if with_nightly(request) else [])]
    command = ["python", str(WORKERS / "joint_batch.py"), str(folder / "found.json"), *cases]
    code, output = run("mpirun", 2, *command, cwd=folder)
    assert code == 0, output
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.nightly) for case in NIGHTLY_CASES)]
)
def test_two_ranks_equal_one_process_on_the_joint_batch(joint_batch, case):
    """2 ranks x 16 against 1 x 32, 20 steps, weights and slots; without the reduction it is another result."""
    results = joint_batch["cases"][case]
    assert joint_batch["size"] == 2
    assert results["error"] < results["tolerance"]
    assert results["error_without_reduction"] > max(0.1, 3 * results["tolerance"])
    assert results["rank_difference"] == 0, "at the end, and at the start after the broadcast"
    assert results["reductions"] == results["expected"], (
        "one for each step that changes weights, counted in the graph"
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("mpirun", 2), id="mpi-2"),
        pytest.param(("gloo", 3), marks=pytest.mark.release, id="gloo-3"),
    ],
)
def library(request, tmp_path_factory):
    launcher, num_ranks = request.param
    ranks = run_worker(launcher, num_ranks, "library.py", tmp_path_factory.mktemp(launcher))
    assert [results["size"] for results in ranks] == [num_ranks] * num_ranks
    return ranks


def test_a_contrastive_loss_over_the_joint_batch_equals_one_process(library):
    """Control: with the gradient of Horovod's allgather it does not."""
    for rank in library:
        assert rank["contrastive"] < 1e-6
        assert rank["contrastive by the mean"] > 1e-3


def test_collectives(library):
    size = len(library)
    total = size * (size - 1) / 2
    for rank, results in enumerate(library):
        values = results["collectives"]
        assert values["mean"] == pytest.approx(total / size)
        assert values["sum"] == total
        assert values["gathered_rows"] == [size * (size + 1) // 2, 2]
        assert values["broadcast"] == 7
        assert values["object"] == values["object by a function"] == {"from": 0}
        assert values["in place"] == [3.0, 4.0, rank, 3.0, 4.0]
        assert values["objects"] == list(range(size))
        assert values["sums"] == [[size, total], 2.5 * size]


def test_ranks_with_different_models_are_told(library):
    assert all(
        "hold different variables at position 0" in results["other_models"] for results in library
    )


def test_metrics_over_uneven_shards_equal_one_process(library):
    for results in library:
        metrics = results["metrics"]
        assert metrics["together"] == pytest.approx(metrics["alone"], abs=1e-6)
        assert metrics["lonely"] == pytest.approx(metrics["alone"], abs=1e-6)


def test_all_ranks_skip_an_overflow_together(library):
    size = len(library)
    for results in library:
        overflow = results["overflow"]
        assert overflow["type"] == "LossScaleOptimizer"
        assert overflow["skipped"] == [1.0, 2.0]
        assert overflow["scale"] == 2.0**14
        step = 0.1 * (size + 1) / 2
        assert overflow["after"] == pytest.approx([1.0 - step, 2.0 - step], rel=1e-3)


def refusals(library, name):
    return [results["refusals"][name] for results in library]


def test_ranks_with_different_gradients_are_told_before_they_reduce_them(library):
    last = len(library) - 1
    ranks = f"cannot reduce the gradients of ranks 0 and {last}: "
    for message in refusals(library, "unlike_shapes"):
        assert (
            f"RankError: {ranks}gradient 0 is d/kernel float32 [4, 5] on rank 0, unlike/kernel float32 [4, 6]"
            in message
        )
    for messages in refusals(library, "gradients_of_one_rank"):
        lacks = f"{ranks}gradient 1 is b float32 [1] on rank 0, "
        assert messages["optimizer"].startswith("RankError: ")
        assert f"{lacks}b without a gradient on rank {last}" in messages["optimizer"]
        assert f"{lacks}b without a gradient on rank {last}" in messages["tape"]
        assert f"{lacks}missing on rank {last}" in messages["accumulated"]
        assert (
            f"{ranks}the reduction is set to op=Average, compression=NoneCompressor, groups=None"
            in messages["settings"]
        )
        assert messages["on all"] == [[-1.0, 0.0], [1.0]]


def test_groups_of_unlike_tensors_are_told_before_foreign_memory_is_read(library):
    size = len(library)
    ranks = f"RankError: cannot reduce the tensors of ranks 0 and {size - 1}: tensor 1 is float32"
    for messages in refusals(library, "groups"):
        assert (
            f"{ranks} [2, 4] on rank 0, float32 [2, 5] on rank {size - 1}; give tensors of"
            in messages["allreduce"]
        )
        assert (
            f"{ranks} [None, 4] on rank 0, float32 [None, 5] on rank {size - 1}"
            in messages["allgather"]
        )
        assert f"{ranks} [2, 4] on rank 0, missing on rank {size - 1}" in messages["reducescatter"]
        assert messages["alike"] == [3 * size, 8 * size]
        assert messages["of own length"] == [[size * (size + 1) // 2, 2]]


def test_a_step_that_one_rank_alone_traces_again(library):
    assert refusals(library, "traced_again") == [4] * len(library)


def test_names_that_keras_numbers_may_differ(library):
    assert refusals(library, "numbered_names") == [2] * len(library)


def test_what_would_be_reduced_twice_or_not_at_all_is_refused(library):
    for messages in refusals(library, "twice"):
        assert (
            "ValueError" in messages["inside a loss scale"]
            and "wrap the outer one" in messages["inside a loss scale"]
        )
        assert "wrap the outer one" in messages["scaled inside a loss scale"]
        assert "is inside the DistributedOptimizer delegates" in messages["inside another"]
        assert "is a DistributedOptimizer already" in messages["inside a multi-optimizer"]
        assert (
            "ValueError: a LossScaleOptimizer got gradients of a loss that never went"
            in messages["never scaled"]
        )
        assert (
            "OwnApply overrides apply and has gradient_accumulation_steps=2"
            in messages["accumulates by itself"]
        )


def test_accumulation_outside_of_graphs(library):
    assert refusals(library, "accumulated_eagerly") == [[[-(len(library) + 1) / 2], 1]] * len(
        library
    )


def test_a_loss_that_nobody_scales_is_not_scaled_back(library):
    for results in refusals(library, "unscaled"):
        assert results["loop"] == [-(len(library) + 1) / 2]
        assert results["gap"] < 1e-3


def test_collectives_return_tensors_that_a_tape_differentiates(library):
    size = len(library)
    for rank, results in enumerate(refusals(library, "tensors")):
        assert results["tensors"] == [True] * 4
        assert results["allgather"] == [2.0 * (rank + 1)]
        assert results["allreduce"] == pytest.approx([size + 1])


def test_a_saved_model_loads_as_a_plain_optimizer(library):
    for results in library:
        assert results["saved"] == {
            "plain": True,
            "equal_slots": True,
            "iterations": 4,
            "distributed": True,
        }


def test_shards_are_disjoint_and_complete(library):
    size = len(library)
    for split, count in (("training", 37), ("test", 11)):
        read = [results["shards"][split] for results in library]
        assert sorted(number for ids in read for number in ids) == list(range(count))
        assert [len(ids) for ids in read] == [len(range(rank, count, size)) for rank in range(size)]


def test_training_that_reduces_nothing_is_stopped(library):
    assert all("the first step reduced no gradient" in results["unreduced"] for results in library)


def test_callbacks_of_upstream(library):
    size = len(library)
    for results in library:
        logs = results["callbacks"]["logs"]
        assert all(other == logs[0] for other in logs), "averaged over ranks, so equal on all"
        assert results["callbacks"]["equal_weights"]
        rates = results["callbacks"]["rates"]
        # 4 steps an epoch, 2 epochs of warm-up from base to base x size, upstream's formula.
        expected = [0.1 * ((step + 1) / 4 * (size - 1) / 2 + 1) for step in range(8)] + [
            0.1 * size
        ] * 4
        assert rates == pytest.approx(expected, rel=1e-5)


def idioms(library, name):
    return [results["idioms"][name] for results in library]


def test_variables_are_broadcast_inside_a_function(library):
    for results in idioms(library, "broadcast"):
        assert results["before"] > 0.1 and results["after"] == 0
        assert results["seeds differ"], "or dropout would drop the same units on all ranks"
        assert results["bfloat16"] == [1.5, 0.0]
        assert "hold different variables at position 0" in results["unlike"]


def test_a_loop_without_a_broadcast_is_warned(library):
    for rank, results in enumerate(idioms(library, "forgotten")):
        message = "the ranks train from different weights, and nothing has made them equal"
        assert [text.partition(";")[0] for text in results["forgotten"]] == [message] * (rank == 0)
        assert results["after the first step"] == results["one step"] == []


def test_a_copy_of_a_distributed_optimizer_reduces(library):
    mean = (len(library) + 1) / 2
    for results in idioms(library, "copies"):
        assert results["pickled"] == results["deep"] == [-mean, 1]
        assert results["sums passes"] == 2
        assert "copy the plain optimizer, and wrap the copy" in results["local"]
        assert results["called"]


def test_xla_is_refused_in_one_line(library):
    for results in idioms(library, "xla"):
        assert all(
            "XLA compiles this step" in message and "pass jit_compile=False" in message
            for message in results
        )


def test_a_warm_up_of_a_schedule_is_refused(library):
    assert all(
        "the optimizer has a schedule (ExponentialDecay); give" in message
        for message in idioms(library, "schedule")
    )


def test_optimizers_of_a_model_that_compile_does_not_know(library):
    assert idioms(library, "own_optimizers") == [[0, 0]] * len(library)


def test_the_broadcast_warns_of_ranks_that_train_alone(library):
    for rank, results in enumerate(idioms(library, "warnings")):
        for messages in (results["plain"], results["in executions"]):
            assert len(messages) == 1
            assert f"rank {rank} of {len(library)} trains alone" in messages[0]
        assert [
            "call model.build(input_shape) before fit" in message for message in results["unbuilt"]
        ] == [True] * (rank == 0)
        assert results["neither"] == []


def test_a_model_that_one_rank_alone_has_built_is_refused_on_all(library):
    for rank, messages in enumerate(idioms(library, "built")):
        ranks = f"ranks {rank} and {0 if rank else 1} hold different variables at position 0: "
        for message in messages:
            assert message.startswith(f"RankError: {ranks}")
            assert "((4, 3), 'float32')" in message
        assert " missing" in messages[1]


def test_epochs_that_differ_between_ranks(library):
    last = len(library) - 1
    for results in idioms(library, "unlike"):
        assert f"an epoch has 4 batch(es) on rank 0 and 3 on rank {last}" in results["batches"]
        assert (
            "different metrics after epoch 1" in results["metrics"]
            and "has ['loss', 'val_loss']" in results["metrics"]
        )
        assert results["smallest"] == 3
        assert "the smallest number of batches on any rank is 0" in results["none"]


def test_a_tape_and_an_optimizer_that_both_sum(library):
    for results in idioms(library, "twice"):
        assert "reduce them twice; use a plain optimizer, or a plain tape" in results["sum"]
        assert results["mean"] == [-(len(library) + 1) / 2]


def test_scales_of_float8_are_the_same_on_all_ranks(library):
    """Rank 1's inputs are twice as large; accumulated or not."""
    for results in idioms(library, "float8"):
        for number, gap, largest in results.values():
            assert number == 6 and gap == 0 and largest > 1


def test_rows_with_the_same_index_are_summed_where_their_order_changes(library):
    for results in idioms(library, "rows"):
        assert results["as they are"] > 0 and results["summed"] == 0


def test_models_of_other_formats_and_makers_are_loaded(library):
    for results in idioms(library, "loaded"):
        assert results["h5"] == [True, 0, 8]
        assert results["function"] == [True, True]


def test_tapes_in_old_graphs_and_then_in_functions(library):
    mean = float(len(library) + 1)
    assert idioms(library, "old_graphs") == [[[mean], [mean]]] * len(library)


def test_join_after_sparse_gradients_is_refused(library):
    for has_gathered, message in idioms(library, "join"):
        assert has_gathered and "pass sparse_as_dense=True" in message


@pytest.mark.parametrize("waits", [[], pytest.param(["100"], marks=pytest.mark.nightly)])
def test_a_rank_that_waits_for_another_says_so_at_the_end(waits, tmp_path):
    """The other one ends after fewer batches, or never comes."""
    limits = (
        {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
        if waits
        else {}
    )
    worker = str(WORKERS / "unlike_batches.py")
    code, output = run("mpirun", 2, "python", worker, *waits, cwd=tmp_path, **limits)
    assert code != 0
    assert "\nhvtrain: rank 0 waited for a rank that is gone or never came." in output
