"""Runs of two ranks that begin with weights, train parts, average them and synchronize batch normalization."""

import csv
import json

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file

from hvtrain.core.topology import Topology
from launching import many_runs, without_hvtrain
from own.leaves import leaves
from tiers import with_release

# By default test_parts.py, test_first_weights.py, test_built_model.py and test_rates_and_averages.py hold what is done
# to a model; here ranks train it and go on.
pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

NORM = ["model.norm=true", "dataset.num_validation=48", "train.steps=20", "checkpoint.keep=9"]
TUNED = [
    *NORM, "model.weights={folder}/source", "model.freeze=[hidden,norm]", "train.rates={logits/bias:0.5}",
    "train.ema=0.8", "train.accumulate=2", "guard.every=2", "seed=2",
]  # fmt: skip
LORA = [*NORM, "model.weights={folder}/source/model.keras", "model.lora_rank=2", "seed=3"]
SYNCED = [*NORM, "train.sync_batch_norm=true", "optimizer=momentum", "optimizer.learning_rate=0.01"]
RUNS = {
    "source": NORM,
    "tuned": TUNED,
    "tuned in parts/1": [*TUNED, "train.steps=8"],
    "tuned in parts/2": TUNED,
    "joint synced": [
        "model.norm=true",
        "train.steps=20",
        "train.sync_batch_norm=true",
        "optimizer=momentum",
    ],
    "joint plain": ["model.norm=true", "train.steps=20", "optimizer=momentum"],
    "wide": [*NORM, "model.units=9", "model.weights={folder}/source"],
    "own arguments": ["model._target_=leaves.loads_by_itself", "model.weights={folder}/source"],
    "tuned in parts/3": TUNED,
    "lora": LORA,
    "synced": SYNCED,
    "synced in parts/1": [*SYNCED, "train.steps=7"],
    "synced in parts/2": SYNCED,
    "synced again": [*SYNCED, "train.remat=true"],
}
RUNS_FOR_RELEASE = {"lora in parts/1": [*LORA, "train.steps=7"], "lora in parts/2": LORA}


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory):
    """(folder, what each rank saw, all output)."""
    folder = tmp_path_factory.mktemp("finetuned")
    release_too = RUNS_FOR_RELEASE if with_release(request) else {}
    runs = {
        name: [setting.replace("{folder}", str(folder)) for setting in settings]
        for name, settings in {**RUNS, **release_too}.items()
    }
    results, output = many_runs("gloo", 2, runs, folder)
    return folder, results, output


def arrays(folder, step=20):
    return load_file(folder / f"checkpoints/step-{step:08d}/state.safetensors")


@pytest.mark.parametrize(
    "name", ["tuned", "synced", pytest.param("lora", marks=pytest.mark.release)]
)
def test_a_resumed_run_ends_with_the_same_bits(two_ranks, name):
    folder, results, _ = two_ranks
    assert results[0][f"{name} in parts/2"]["record"]["first_step"] in (7, 8)
    whole, resumed = arrays(folder / name), arrays(folder / f"{name} in parts")
    assert whole.keys() == resumed.keys()
    for key in whole:
        np.testing.assert_array_equal(whole[key], resumed[key], key)


def test_the_checkpoint_wins_over_the_first_weights(two_ranks):
    _, _, output = two_ranks
    assert output.count("/source/best.keras\n") == 2, "read once by each of two runs, on rank 0"
    assert output.count("resumed        step-00000008: 8 of 20 steps were done") == 1


def test_a_finished_run_is_tested_as_before(two_ranks):
    _, results, _ = two_ranks
    assert "error" not in results[0]["tuned in parts/3"]
    assert (
        results[0]["tuned in parts/3"]["record"]["metrics"]
        == results[0]["tuned"]["record"]["metrics"]
    )


def test_frozen_parts_are_those_of_the_source_and_the_rest_trains(two_ranks):
    folder, results, output = two_ranks
    best = results[0]["source"]["record"]["best"]["step"]
    source, tuned = arrays(folder / "source", best), arrays(folder / "tuned")
    frozen = {key for key in source if key.startswith("model/") and "logits" not in key}
    assert len(frozen) == 6
    for key in frozen:
        np.testing.assert_array_equal(source[key], tuned[key], key)
    assert not np.array_equal(source["model/0006/logits/kernel"], tuned["model/0006/logits/kernel"])
    slots = [key for key in tuned if key.startswith("optimizer/") and "logits" in key]
    assert slots and not [
        key for key in tuned if key.startswith("optimizer/") and ("hidden" in key or "norm" in key)
    ]
    assert "trained        36 of 348 parameters, in 2 variables" in output
    proof = results[0]["tuned"]["record"]["proof"]
    assert proof["reductions"] == proof["steps"] == 10 and proof["weight_checks"] > 10


def test_the_average_is_validated_and_saved_and_training_goes_on_without_it(two_ranks):
    folder, results, _ = two_ranks
    record = results[0]["tuned"]["record"]
    for file, step in (("model.keras", 20), ("best.keras", record["best"]["step"])):
        saved, kept = (
            keras.models.load_model(folder / "tuned" / file).layers[-1],
            arrays(folder / "tuned", step),
        )
        (average,) = [key for key in kept if key.endswith("kernel_average")]
        kernel = saved.get_layer("logits").kernel.numpy()
        np.testing.assert_array_equal(kernel, kept[average])
        assert np.abs(kernel - kept["model/0006/logits/kernel"]).max() > 1e-4, (
            "the raw weights are others"
        )
    # The last epoch's validation, anew from what is saved.
    saved = keras.models.load_model(folder / "tuned/model.keras").layers[-1]
    losses = saved.evaluate(
        leaves(num_validation=48).evaluation("validation", Topology(), 48), verbose=0
    )
    with (folder / "tuned/history.csv").open() as stream:
        validated = [
            float(row["val_loss"]) for row in csv.DictReader(stream) if int(row["step"]) == 20
        ]
    assert validated == [pytest.approx(losses[0], rel=1e-5)]


def test_lora_trains_little_and_leaves_a_plain_model(two_ranks):
    folder, results, output = two_ranks
    assert results[0]["lora"]["record"]["num_parameters"] == 364 + 36 * 2 + 2 * 8
    assert "trained        124 of 436 parameters, in 4 variables" in output
    printed = without_hvtrain(
        f"""
import keras, numpy as np
model = keras.models.load_model({str(folder / "lora/model.keras")!r})
print(model.count_params(), [v.path for v in model.weights if "lora" in v.path])
np.save({str(folder / "kernel.npy")!r}, model.layers[-1].get_layer("hidden").kernel)
""",
        cwd=folder,
    )
    assert printed.split() == ["364", "[]"]
    kept = {
        key.split("/", 2)[2]: array
        for key, array in arrays(folder / "lora").items()
        if key.startswith("model/")
    }
    merged = kept["hidden/kernel"] + kept["hidden/lora_kernel_a"] @ kept["hidden/lora_kernel_b"]
    np.testing.assert_allclose(np.load(folder / "kernel.npy"), merged, rtol=1e-5, atol=1e-6)
    last = arrays(folder / "source")
    np.testing.assert_array_equal(kept["hidden/kernel"], last["model/0000/hidden/kernel"])
    assert np.abs(merged - kept["hidden/kernel"]).max() > 1e-3


def test_synchronized_batch_normalization_equals_one_process_on_the_joint_batch(two_ranks):
    _, results, _ = two_ranks
    for rank in results:
        assert rank["joint synced"]["exact"] < 1e-5
        assert rank["joint plain"]["exact"] > 1e-3, "each rank's own batch gives something else"


def test_recomputation_synchronizes_the_same(two_ranks):
    folder, _, _ = two_ranks
    once, again = arrays(folder / "synced"), arrays(folder / "synced again")
    for key in once:
        np.testing.assert_allclose(once[key], again[key], rtol=1e-4, atol=1e-6, err_msg=key)


def test_saved_models_have_keras_own_batch_normalization(two_ranks):
    folder, _, _ = two_ranks
    model = f"keras.models.load_model({str(folder / 'synced/model.keras')!r}).layers[-1]"
    code = (
        f"import keras; print(type({model}.get_layer('norm')) is keras.layers.BatchNormalization)"
    )
    assert without_hvtrain(code, cwd=folder).strip() == "True"


def test_refusals_are_the_same_line_on_all_ranks(two_ranks):
    folder, results, _ = two_ranks
    for rank in results:
        assert rank["wide"]["error"] == (
            f"ConfigError: model.weights={folder}/source belongs to another model: it has shape (36, 8) where "
            "hidden/kernel of this model has shape (36, 9); choose the model that it was made with, or list the "
            "variables that stay new in model.weights_except"
        )
        assert rank["own arguments"]["error"] == (
            "ConfigError: model._target_=leaves.loads_by_itself has an argument weights, but model.weights is a "
            "setting of every model, which builders do not get; rename the argument"
        )


def test_the_run_says_where_it_began(two_ranks):
    folder, _, output = two_ranks
    assert f"weights        364 parameters from {folder}/source/best.keras\n" in output
    assert json.loads((folder / "tuned/result.json").read_text())["config"]["model"]["freeze"] == [
        "hidden",
        "norm",
    ]
