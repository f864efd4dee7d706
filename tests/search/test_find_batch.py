"""python -m hvtrain find_batch: on two ranks, until one of them, the data or the memory of the host says no."""

import json
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
import tensorflow as tf
from horovod.tensorflow.mpi_ops import _allreduce

from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.errors import ConfigError
from hvtrain.search import batch_search
from hvtrain.search.batch_sizes import RankMemory, Trial, lacking_host, predicted_peak
from hvtrain.search.commands import as_search, find_batch
from hvtrain.strategies.local import LocalSGDStrategy
from hvtrain.strategies.mirrored import MirroredStrategy
from launching import ROOT, run

MODULE = ("python", "-m", "hvtrain", "find_batch")
OWN = ROOT / "tests/support/own"


def content(folder):
    results = json.loads((folder / "batch.json").read_text())
    return [size["batch_size"] for size in results["sizes"]], results


@pytest.mark.distributed
@pytest.mark.nightly
def test_what_one_of_two_ranks_has_no_memory_for_ends_the_search_on_both(tmp_path):
    """A tensor of a million gigabytes on rank 1 from batches of 32 on: TensorFlow's own error, in its step alone."""
    arguments = (
        "--config-dir",
        str(OWN / "conf"),
        "model=tiny",
        "dataset=leaves",
        "model.huge_on_rank=1",
    )
    path = f"{ROOT}:{OWN}"
    code, output = run(
        "gloo",
        2,
        *MODULE,
        *arguments,
        "--first",
        "8",
        "--steps",
        "2",
        "run.dir=test",
        cwd=tmp_path,
        PYTHONPATH=path,
    )
    assert code == 0, output
    assert "ended: train.batch_size=32 exceeds the memory of rank 1\n" in output
    assert "largest that fits, of those tried: train.batch_size=16\n" in output
    sizes, results = content(tmp_path / "test")
    assert (sizes, results["largest"]) == ([8, 16], 16)
    for size in results["sizes"]:
        assert size["global_batch"] == 2 * size["batch_size"]
        assert size["examples_per_second"] == pytest.approx(
            size["global_batch"] / size["step_seconds"], abs=0.1
        )
        assert len(size["memory_bytes"]) == 2 and min(size["memory_bytes"]) > 10**8
    assert (tmp_path / "test/batch.png").stat().st_size > 5000
    best = f"train.batch_size={results['fastest']}"
    kept = shlex.join(argument for argument in (*arguments, best))
    for command in ("hvtrain", "hvtrain find_lr"):
        assert f"  horovodrun -np 2 python -m {command} {kept}\n" in output


@pytest.mark.distributed
@pytest.mark.nightly
def test_the_search_ends_with_the_data(tmp_path):
    arguments = (
        "model=mlp",
        "--first",
        "128",
        "--steps",
        "1",
        "train.accumulate=2",
        "run.dir=test",
    )
    code, output = run("mpi", 2, *MODULE, *arguments, cwd=tmp_path)
    assert code == 0, output
    assert "ended: train.accumulate=2 exceeds a rank's number of batches in an epoch, 1" in output
    assert content(tmp_path / "test")[0] == [128, 256]


@pytest.mark.nightly
def test_a_size_that_exceeds_the_memory_is_not_begun(tmp_path):
    arguments = (
        "model=cnn",
        "dataset=synthetic",
        "dataset.image_shape=[64,64,3]",
        "dataset.num_train=200000",
    )
    code, output = run(
        None, 1, *MODULE, *arguments, "--memory", "2", "--first", "64", "--steps", "1", cwd=tmp_path
    )
    assert code == 0, output
    assert re.search(
        r"ended: train.batch_size=\d+ would take about \S+ GiB more on \S+, which has \S+ GiB left",
        output,
    )
    (folder,) = (tmp_path / "find_batch").iterdir()
    assert max(content(folder)[1]["sizes"][-1]["memory_bytes"]) < 2 * 2**30


def test_no_memory_for_the_first_size_is_an_error(tmp_path):
    code, output = run(None, 1, *MODULE, "model=mlp", "--memory", "0.001", cwd=tmp_path)
    assert code == 2
    assert "hvtrain: no batch was tried: train.batch_size=1 would take about " in output
    assert output.rstrip().endswith("choose a smaller --first, or a smaller model")


def test_the_prediction_takes_the_steepest_growth_so_far():
    assert predicted_peak([(0, 100), (4, 500), (8, 900), (16, 900)], 32, 0.0) == 900 + 16 * 100
    assert predicted_peak([(0, 100), (4, 500)], 8, 0.0) == 500 + 4 * 100
    shrinks = [(0, 100), (4, 500), (8, 400)]
    assert predicted_peak(shrinks, 16, 0.0) == 400


def test_ranks_of_a_host_share_its_memory():
    ranks = [
        RankMemory("s1", 1e9, 10**10, 0),
        RankMemory("s2", 1e9, 2 * 10**9, 0),
        RankMemory("s2", 1e9, 2 * 10**9, 0),
    ]
    assert lacking_host(ranks) == ("s2", 2e9, 2 * 10**9)
    assert lacking_host(ranks[:2]) is None
    assert lacking_host([RankMemory("s1", 0.0, 10**9, 10)], limit_bytes=5) == ("s1", 0.0, 0), (
        "more than allowed already"
    )


def test_a_collective_within_a_branch_is_found():
    def step(x, is_reduced):
        return tf.cond(x > 0, lambda: _allreduce(x, name="sum") if is_reduced else x, lambda: x)

    for is_reduced in (True, False):
        graph = tf.function(step).get_concrete_function(tf.constant(1.0), is_reduced).graph
        assert batch_search._has_collectives(graph) is is_reduced


def test_the_line_that_uses_the_result_has_no_secrets(tmp_path, monkeypatch):
    """It goes to the log file, too."""
    lines = []
    monkeypatch.setattr(batch_search.log, "info", lambda text, *more: lines.append(text % more))
    run = SimpleNamespace(plan=SimpleNamespace(size=2), folder=tmp_path)
    batch_search._report([Trial(8, 16, 0.1, [0, 0])], run, ["model=cnn", "dataset.api_key=hunter2"])
    assert (
        "  horovodrun -np 2 python -m hvtrain model=cnn 'dataset.api_key=***' train.batch_size=8"
        in lines
    )


@pytest.mark.parametrize("strategy", ["horovod", "elastic"])
def test_powersgd_compresses_batches_of_all_sizes(strategy):
    config = from_dict(compose(["model=mlp", f"strategy={strategy}"]))
    assert as_search(config, 1, 5).strategy.get("whole_steps", 0) == 0


@pytest.mark.parametrize("strategy", [MirroredStrategy(), LocalSGDStrategy()])
def test_ranks_without_batches_of_their_own_or_a_reduction_in_every_step_are_refused(strategy):
    with pytest.raises(
        ConfigError,
        match=f"in every step, which strategy={strategy.name} lacks; choose strategy=horovod, elastic or single",
    ):
        batch_search.try_sizes(None, strategy, None, None, None, ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--largest", "0"],
            "argument --largest: 0 is not a whole number of at least 1",
        ),
        (["--memory", "0"], "argument --memory: 0 is not a number above 0"),
        (["modle=cnn"], "unknown setting 'modle'; did you mean 'model'?"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["find_batch", *arguments])
    with pytest.raises(ConfigError) as caught:
        find_batch()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
