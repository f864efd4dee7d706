"""Two ranks of the runner on GPUs, several runs in one start.

Precisions, XLA, methods for slow networks, sharded state, virtual ranks, recomputed gradients, resume, tuning, and
where the time goes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hardware import sharing
from safetensors.numpy import load_file

from launching import many_runs

pytestmark = pytest.mark.distributed
DIGITS = ["dataset=digits", "model=mlp", "train.epochs=8"]
PRECISIONS = ["float32", "mixed_float16", "mixed_bfloat16"]
# Dropout, augmentation and Adam's slots: what a resume could lose.
RESUMED = ["dataset=digits", "model=cnn", "dataset.shift_pixels=1", "train.deterministic=true"]
# Names of runs, and the settings of each: what changes how gradients travel, or where state lives.
METHODS = {
    "local steps": ["strategy=local_sgd", "strategy.every=4"],
    "outer optimizer": ["strategy=diloco", "strategy.every=4", "strategy.compression=int8"],
    "bytes": ["strategy.compression=bf16"],
    "levels": ["strategy.compression=int8"],
    "factors": ["strategy.compression=powersgd", "strategy.whole_steps=5"],
    "shards": ["strategy.shard_optimizer=true"],
}
CLICKS = [
    "model=dlrm",
    "dataset=clicks",
    "task=binary",
    "dataset.num_train=8192",
    "dataset.num_test=1024",
]
CLICKS += ["optimizer=rowwise_adagrad", "optimizer.learning_rate=0.03", "train.epochs=2"]
SYNTHETIC = ["dataset.image_shape=[32,32,3]", "dataset.num_classes=10", "dataset.num_train=2560"]
RUNS = {
    **{precision: [*DIGITS, f"train.precision={precision}"] for precision in PRECISIONS},
    "xla": [*DIGITS, "train.jit_compile=true"],
    "timed": ["dataset=synthetic", *SYNTHETIC, "model=cnn", "train.steps=120"],
    "tuned": [*DIGITS, "comm.tune=true"],
    **{name: [*DIGITS, *method] for name, method in METHODS.items()},
    "whole tables": CLICKS,
    "sharded tables": [*CLICKS, "model.shard_embeddings=[*_table]"],
    # Last: deterministic operations stay on in a process.
    "whole": [*RESUMED, "train.epochs=4"],
    "resumed/first": [*RESUMED, "train.epochs=2"],
    "resumed/second": [*RESUMED, "train.epochs=4"],
    "recomputed": [*RESUMED, "train.epochs=4", "guard.recompute_every=10"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, what rank 0 saw of RUNS, all output)."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = {name: [*arguments, *sharing(2)] for name, arguments in RUNS.items()}
    result, output = many_runs("mpi", 2, arguments, folder, TF_CPP_MIN_LOG_LEVEL="0")
    return folder, result[0], output


def record(runs, name: str) -> dict:
    _, result, output = runs
    assert "record" in result[name], f"{result[name]}\n{output}"
    return result[name]["record"]


@pytest.mark.parametrize("name", [*PRECISIONS, "xla"])
def test_two_ranks_train(runs, name, record_property):
    result = record(runs, name)
    record_property("accuracy", result["test_accuracy"])
    record_property("examples/s", result["examples_per_second"])
    assert result["num_ranks"] == 2
    assert result["test_accuracy"] > 0.85
    assert result["reductions"] == result["num_steps"], "every step was reduced, and once"
    assert result["proof"]["ranks"] == 2 and result["proof"]["weight_checks"] > 0
    assert result["config"]["train"]["precision"] == (name if name in PRECISIONS else "float32")
    assert result["config"]["train"]["jit_compile"] == (name == "xla")


def test_compiled_steps_end_with_nearly_the_same_loss(runs, record_property):
    plain, compiled = record(runs, "float32"), record(runs, "xla")
    assert "Compiled cluster using XLA" in runs[2]
    difference = abs(plain["test_loss"] - compiled["test_loss"])
    record_property("difference of the losses", difference)
    assert difference < 0.02


def test_data_compute_and_communication_add_up_to_a_step(runs, record_property):
    """Against the clock around the calls of the graph, which the graph's own clocks do not see."""
    result = record(runs, "timed")
    split = {
        name: result["split"][f"{name}_seconds"] for name in ("data", "compute", "communication")
    }
    for name, seconds in split.items():
        record_property(f"{name} ms", 1000 * seconds)
    record_property("step ms", 1000 * result["step_seconds"])
    assert all(seconds > 0 for seconds in split.values())
    assert sum(split.values()) == pytest.approx(result["step_seconds"], rel=0.1)


def test_settings_of_the_reduction_are_tuned(runs, record_property):
    folder, _, output = runs
    assert record(runs, "tuned")["test_accuracy"] > 0.85
    kept = json.loads((folder / "tuned" / "comm.json").read_text())
    record_property("cycle ms", kept["comm"]["cycle_ms"])
    record_property("bucket MiB", kept["comm"]["bucket_mib"])
    record_property("devices", ", ".join(kept["devices"]))
    assert len(kept["devices"]) == 2 and "comm.tune: cycle " in output


@pytest.mark.parametrize("name", METHODS)
def test_methods_for_slow_networks_and_sharded_slots_train(runs, name, record_property):
    result = record(runs, name)
    record_property("accuracy", result["test_accuracy"])
    record_property("bytes sent", result["proof"]["sent_bytes"])
    assert result["test_accuracy"] > 0.85
    assert result["proof"]["ranks"] == 2 and result["proof"]["weight_checks"] > 0


def test_sharded_tables_learn_what_whole_ones_learn(runs):
    whole, sharded = record(runs, "whole tables"), record(runs, "sharded tables")
    assert min(whole["test_accuracy"], sharded["test_accuracy"]) > 0.6
    assert sharded["test_accuracy"] == pytest.approx(whole["test_accuracy"], abs=0.03), (
        "their rows begin differently"
    )


def test_recomputed_gradients_raise_no_alarm_and_change_no_bit(runs):
    folder, _, output = runs
    assert record(runs, "recomputed")["num_steps"] == record(runs, "whole")["num_steps"]
    assert "gradients on all ranks, with relative differences up to" in output
    ours, expected = newest(folder / "recomputed"), newest(folder / "whole")
    assert all((ours[name] == expected[name]).all() for name in expected)


def newest(run: Path) -> dict:
    path = max((run / "checkpoints").glob("step-*"), key=lambda path: path.name)
    return load_file(path / "state.safetensors")


def test_a_resumed_run_ends_with_the_same_bits(runs):
    """With deterministic operations, on GPUs too."""
    folder, *_ = runs
    whole, resumed = record(runs, "whole"), record(runs, "resumed/second")
    assert resumed["first_step"] == record(runs, "resumed/first")["num_steps"] > 0
    assert resumed["test_loss"] == whole["test_loss"]
    ours, expected = newest(folder / "resumed"), newest(folder / "whole")
    assert ours.keys() == expected.keys() and len(ours) > 10
    assert all((ours[name] == expected[name]).all() for name in ours)
