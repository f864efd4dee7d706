"""Ranks on GPUs: each on its own, sums through NCCL, equality with one joint batch, of layers too, one GPU shared."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from hardware import ON_CPU, device, num_gpus

from launching import run

pytestmark = pytest.mark.distributed
WORKER = str(Path(__file__).with_name("worker.py"))
HOST = socket.gethostname()


def found_by(folder: Path, launcher: str | None, num_ranks: int, *arguments: str) -> list[dict]:
    path = folder / "found.json"
    code, output = run(launcher, num_ranks, "python", WORKER, str(path), *arguments, cwd=folder)
    assert code == 0, output
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return found_by(tmp_path_factory.mktemp("one"), None, 1)


@pytest.fixture(scope="module", params=["gloo", "mpi"])
def two_gpus(request, tmp_path_factory):
    return found_by(tmp_path_factory.mktemp(request.param), request.param, 2)


@pytest.fixture(scope="module")
def one_gpu_for_two(tmp_path_factory):
    if not ON_CPU and num_gpus() != 1:
        pytest.skip(
            f"{num_gpus()} GPUs: two ranks need not share one (CUDA_VISIBLE_DEVICES=0 leaves one)"
        )
    return found_by(tmp_path_factory.mktemp("shared"), "gloo", 2, "share")


def assert_computes_there(result: dict, mine: str) -> None:
    location = result["place"]
    assert mine in location["devices"]
    assert location["right"]
    assert location["computed_on"] == ("CPU" if ON_CPU else "GPU")
    in_words = "" if ON_CPU else r"GPU memory \d+\.\d GiB, peak \d+\.\d GiB; GPU busy \d+%"
    assert re.fullmatch(in_words, location["in_words"]), (
        "NVIDIA's management library knows the GPU by CUDA's UUID"
    )
    assert location["num_visible"] == (0 if ON_CPU else 1), "no other rank's GPU"
    assert location["memory_grows"] == ([] if ON_CPU else [True]), (
        "or the first rank takes all of the memory at once"
    )


def assert_sums_are_right(ranks: list[dict]) -> None:
    for result in ranks:
        assert result["sums"]["errors"] == {"large": 0.0, "small": 0.0, "half": 0.0}
        assert result["sums"]["devices"] == ["CPU" if ON_CPU else "GPU"]
        assert ON_CPU or result["sums"]["nccl_built"], "or sums would go through the hosts' memory"


def assert_loops_equal_one_batch(ranks: list[dict]) -> None:
    for result in ranks:
        loops = result["loops"]
        assert loops["plain_against_joint"] < 1e-5
        assert loops["compiled_against_joint"] < 1e-5
        assert loops["ranks_differ"] == 0
        assert loops["moved"] > 0.05, "it has trained at all"


def assert_layers_equal_one_batch(ranks: list[dict], record_property) -> None:
    """Of sparse gradients how far ranks drift apart is recorded; they may not where operations are deterministic."""
    for result in ranks:
        norm, rows = result["normalization"], result["sparse_gradients"]
        assert max(norm["outputs"], norm["input_gradient"], norm["moving"]) < 1e-4
        assert norm["ranks_differ"] == 0
        assert len(ranks) == 1 or norm["moving_alone"] > 1e-3, "each rank's own moments are others"
        assert max(rows["against_joint"], rows["deterministic_against_joint"]) < 1e-4
        assert len(ranks) == 1 or rows["alone_against_joint"] > 0.01
        assert rows["deterministic_ranks_differ"] == 0
    drift = max(result["sparse_gradients"]["ranks_differ"] for result in ranks)
    record_property("largest difference between ranks", drift)
    assert drift < 1e-4


def test_one_rank_computes_on_the_first_gpu(one):
    assert one[0]["place"]["devices"] == [device(HOST, 0)]
    assert_computes_there(one[0], device(HOST, 0))


def test_a_compiled_step_of_one_rank_equals_a_plain_one(one):
    assert_loops_equal_one_batch(one)


def test_two_ranks_compute_on_a_gpu_each(two_gpus):
    for rank, result in enumerate(two_gpus):
        assert result["place"]["devices"] == [device(HOST, 0), device(HOST, 1)]
        assert_computes_there(result, device(HOST, rank))


def test_sums_of_two_gpus_are_right_through_nccl(two_gpus):
    assert len(two_gpus) == 2
    assert_sums_are_right(two_gpus)


def test_two_gpus_equal_one_joint_batch_compiled_or_not(two_gpus):
    """XLA compiles the model and its loss; the reduction is outside what it compiles."""
    assert_loops_equal_one_batch(two_gpus)


def test_normalization_over_two_gpus_and_sparse_gradients(two_gpus, record_property):
    assert_layers_equal_one_batch(two_gpus, record_property)


def test_two_ranks_share_a_gpu(one_gpu_for_two):
    for result in one_gpu_for_two:
        assert result["place"]["devices"] == [device(HOST, 0)] * 2
        assert_computes_there(result, device(HOST, 0))


def test_two_ranks_that_share_sum_and_train_alike(one_gpu_for_two, record_property):
    assert_sums_are_right(one_gpu_for_two)
    assert_loops_equal_one_batch(one_gpu_for_two)
    assert_layers_equal_one_batch(one_gpu_for_two, record_property)
