"""strategy=local_sgd and diloco, and compression that keeps errors: whole runs on real ranks."""

import json
import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file

import hvtrain.keras as hvd
from hvtrain.checks import rank_checks
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError
from hvtrain.strategies.horovod import ElasticStrategy, HorovodStrategy
from hvtrain.strategies.local import DiLoCoStrategy, LocalSGDStrategy
from launching import many_runs

pytestmark = pytest.mark.distributed

WORDS = [
    "model=mlp",
    "model.dropout=0.2",
    "dataset=digits",
    "train.deterministic=true",
    "dataset.num_validation=100",
]
DILOCO = [
    *WORDS,
    "strategy=diloco",
    "strategy.every=6",
    "strategy.compression=int8",
    "strategy.warmup_steps=2",
]
POWER = [*WORDS, "strategy.compression=powersgd", "strategy.whole_steps=5", "strategy.rank=2"]
RUNS = {
    # First, since deterministic operations are for good. NaN on rank 1 in the sixth of six steps, two
    # steps after the last synchronization of the epoch.
    "nan": [
        "model.nan_on_rank=1",
        "strategy=local_sgd",
        "strategy.every=4",
        "train.learning_rate_scale=none",
    ],
    "local": [
        *WORDS,
        "train.epochs=2",
        "strategy=local_sgd",
        "strategy.every=4",
        "checkpoint.every_steps=8",
        "metrics.file={folder}/local.prom",
    ],
    "whole": [*DILOCO, "train.epochs=2"],
    "begun": [*DILOCO, "train.epochs=1", "run.dir={folder}/resumed"],
    "resumed": [*DILOCO, "train.epochs=2", "run.dir={folder}/resumed"],
    "power whole": [*POWER, "train.epochs=2"],
    "power begun": [*POWER, "train.epochs=1", "run.dir={folder}/power"],
    "power resumed": [*POWER, "train.epochs=2", "run.dir={folder}/power"],
    "within": [
        *WORDS,
        "train.epochs=1",
        "strategy=local_sgd",
        "strategy.within_hosts=true",
        "strategy.warmup_steps=3",
        "train.learning_rate_scale=none",
    ],
    "half precision": [*WORDS, "train.precision=mixed_float16", "strategy.compression=int8"],
    "accumulated": [*WORDS, "strategy=local_sgd", "train.accumulate=2"],
    "in between": [*WORDS, "strategy=local_sgd", "strategy.every=4", "checkpoint.every_steps=6"],
    "saved in between": [
        *WORDS,
        "strategy=local_sgd",
        "+callbacks.own={_target_: keras.callbacks.ModelCheckpoint, filepath: x.keras, save_freq: 16}",
    ],
    "never": [*WORDS, "strategy=local_sgd", "strategy.every=0"],
    "outer": [*WORDS, "strategy=diloco", "strategy.outer_momentum=1.0"],
}
STEPS = 20
"""Of an epoch: 1,337 examples in batches of 2 x 32."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, what each rank saw of RUNS)."""
    folder = tmp_path_factory.mktemp("local")
    settings = {
        name: [word.replace("{folder}", str(folder)) for word in words]
        for name, words in RUNS.items()
    }
    results, _ = many_runs("mpirun", 2, settings, folder)
    return folder, results


def state(folder, step):
    """All arrays of a checkpoint: weights, slots, what each rank keeps."""
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "state.safetensors")


def proof(folder):
    return json.loads((folder / "result.json").read_text())["proof"]


@pytest.mark.parametrize(
    ("name", "kind", "setting", "value"),
    [
        ("local_sgd", LocalSGDStrategy, "shard_optimizer", True),
        ("elastic", ElasticStrategy, "shard_optimizer", True),
        ("elastic", ElasticStrategy, "compression", "int8"),
        ("local_sgd", LocalSGDStrategy, "compression", "int8"),
    ],
)
def test_what_the_ranks_could_not_save_or_would_ignore_is_refused(name, kind, setting, value):
    shown = str(value).lower()
    expected = f"strategy={name} and strategy.{setting}={shown} exclude each other"
    with pytest.raises(ConfigError, match=expected):
        kind(**{setting: value})


def test_a_second_attempt_or_run_keeps_the_process_sets_of_the_hosts(monkeypatch):
    """train.resize=scale starts a strategy again, and bisect starts another one, while Horovod goes on."""
    monkeypatch.setattr(LocalSGDStrategy, "host_set", None)
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    monkeypatch.setattr(HorovodStrategy, "start", lambda self: Topology(0, 4, 0, 2))
    added = []
    monkeypatch.setattr(hvd, "add_process_set", lambda ranks: added.append(ranks) or ranks)
    strategies = LocalSGDStrategy(within_hosts=True), DiLoCoStrategy(within_hosts=True)
    for strategy in (*strategies, strategies[0]):
        hosts = [("other", 2), ("other", 2)]
        monkeypatch.setattr(strategy.comm, "gather", lambda own, hosts=hosts: [own, own, *hosts])
        strategy.start()
        assert strategy.host_set == [0, 1]
    assert sorted(added) == [[0, 1], [2, 3]]

    monkeypatch.setattr(hvd, "shutdown", lambda: None)
    strategies[0].stop()
    strategies[1].start()
    assert len(added) == 4, "Horovod has forgotten them"


def test_verify_does_not_accuse_ranks_that_step_on_their_own(monkeypatch):
    model = SimpleNamespace(optimizer=hvd.LocalSGD(keras.optimizers.SGD()))
    monkeypatch.setattr(rank_checks, "OwnRun", lambda *_: SimpleNamespace(model=model))
    with pytest.raises(ConfigError, match="strategy=local_sgd and verify exclude each other"):
        rank_checks.own_run_checks(None, LocalSGDStrategy())


def test_a_second_attempt_counts_its_own_synchronizations(monkeypatch):
    monkeypatch.setattr(HorovodStrategy, "make_steps", lambda self, model: None)
    strategy = LocalSGDStrategy()
    strategy._hook = SimpleNamespace(num_done=lambda: (0, 0))
    strategy.num_synchronizations = 5
    strategy.make_steps(SimpleNamespace(optimizer=SimpleNamespace(iterations=20)))
    assert strategy.num_synchronizations == 0


def test_synchronizations_are_those_that_are_due(runs):
    """20 steps an epoch: after each 4th; or the first 2, then after each 6th, and at the end of an epoch."""
    folder, _ = runs
    assert (
        proof(folder / "local")["synchronizations"] == proof(folder / "local")["reductions"] == 10
    )
    counted = proof(folder / "whole")
    assert counted["reductions"] == counted["synchronizations"] == 2 + 3 + 1 + 3 + 1
    # Within the host gradients are reduced in the other steps, which settle() counts.
    assert proof(folder / "within")["synchronizations"] == 3 + 1 + 1
    metrics = (folder / "local.prom").read_text()
    (sent,) = re.findall(r"\nhvtrain_sent_bytes_per_step\S+ (\S+)", metrics)
    assert float(sent) == proof(folder / "local")["sent_bytes"] / 4 > 0, "weights, every 4th step"


def test_rank_0_warns_of_a_rate_for_the_joint_batch(runs):
    folder, _ = runs
    lines = {path: path.read_text() for path in folder.glob("*/logs/rank-*.log")}
    warned = {
        str(path.relative_to(folder))
        for path, text in lines.items()
        if "rate is multiplied by 2 for" in text
    }
    assert warned == {f"{name}/logs/rank-0000.log" for name in ("local", "whole", "resumed")}


@pytest.mark.parametrize(("whole", "resumed"), [("whole", "resumed"), ("power whole", "power")])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(runs, whole, resumed):
    """With what each rank keeps for itself; which does differ between the ranks."""
    folder, _ = runs
    expected = state(folder / whole, 2 * STEPS)
    arrays = state(folder / resumed, 2 * STEPS)
    assert expected.keys() == arrays.keys()
    for name, array in expected.items():
        assert np.array_equal(array, arrays[name]), name

    own = [name.removeprefix("rank/0/") for name in expected if name.startswith("rank/0/memory/")]
    differ = [name for name in own if name.split("/")[1] != "same"]
    assert differ and any(
        np.any(expected[f"rank/0/{name}"] != expected[f"rank/1/{name}"]) for name in differ
    )
    equal = [name for name in own if name.split("/")[1] == "same"]
    assert equal and not any(f"rank/1/{name}" in expected for name in equal), "saved once"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "half precision",
            "strategy=horovod: compression int8 keeps errors from step to step, but a loss scale changes their unit",
        ),
        ("accumulated", "strategy=local_sgd and train.accumulate exclude each other"),
        ("in between", "checkpoint.every_steps=6 is not a multiple of strategy.every=4"),
        (
            "saved in between",
            "callbacks.own.save_freq=16 would save rank 0's own weights, since those of strategy=local_sgd differ",
        ),
        ("never", "strategy.every=0 is not a whole number of at least 1"),
        ("outer", "strategy.outer_momentum=1.0 must be at least 0 and less than 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(runs, name, line):
    _, ranks = runs
    for results in ranks:
        assert line in results[name]["error"]


def test_weights_that_are_not_finite_at_the_end_of_an_epoch_name_its_last_step(runs):
    _, ranks = runs
    for results in ranks:
        line = "the weights are not finite on rank 1 at the synchronization of step 6, after a step since"
        assert line in results["nan"]["error"]
        assert "debug=nan" not in results["nan"]["error"]


@pytest.mark.nightly
def test_other_numbers_of_ranks_follow_the_rules(runs, tmp_path):
    """2 ranks, then 3, then 2: slots of new ranks are the mean, errors wait with the same weight."""
    folder, _ = runs
    before = state(folder / "resumed", 2 * STEPS)
    settings = [
        *DILOCO,
        f"run.dir={folder / 'resumed'}",
        "checkpoint.every_steps=6",
        "checkpoint.keep=9",
    ]
    many_runs("mpirun", 3, {"three": [*settings, "train.epochs=3"]}, tmp_path)
    many_runs("mpirun", 2, {"two": [*settings, "train.epochs=4"]}, tmp_path)
    after = state(folder / "resumed", 4 * STEPS)
    names = [{name for name in arrays if name.startswith("rank/1/")} for arrays in (before, after)]
    assert names[0] == names[1]
