"""Each task on real ranks: as one process on the joint batches, and resumed in the middle of an epoch."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from launching import many_runs

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]  # Some fifty runs in one start.

WEIGHTS = {"classification": "balanced", "binary": "{0: 1.0, 1: 4.0}", "segmentation": "{1: 3.0}"}
CUSTOM = [
    "task.loss={size: {_target_: keras.losses.MeanSquaredError}, "
    "kind: {_target_: keras.losses.SparseCategoricalCrossentropy, from_logits: true, ignore_class: -1}}",
    "task.loss_weights={kind: 0.5}",
    "+task.metrics.size.mae._target_=keras.metrics.MeanAbsoluteError",
]
OF_OUTPUTS = ("size_loss", "kind_loss")  # Of which Keras logs the mean over batches, whatever their size.
AUGMENTED = ["dataset=digits", "model=mlp", "train.batch_size=64", "augment=[random_translation,random_erasing,mix_up]"]
TEXTS = ["causal", "masked"]
TEXT = "\n\n".join(f"{i}: " + " ".join(f"{i * j % 17:04b}" for j in range(40)) for i in range(24))
KINDS = ["classification", "binary", "multilabel", "regression", "segmentation", "language", "custom"]


def words(kind, *more):
    own = [f"task={kind}", "dataset._target_=kinds.data", "model._target_=kinds.model", "train.batch_size=8"]
    own += [f"++dataset.kind={kind}", f"++model.kind={kind}", "train.epochs=2", "optimizer.learning_rate=0.05"]
    return [*own, *(CUSTOM if kind == "custom" else []), *more]


def text(objective, *more):
    """A transformer with dropout, on tokens of a text that is read in each rank."""
    own = ["task=language", "dataset=text", "dataset.file=text.txt", "dataset.vocabulary_size=280", "dataset.length=8"]
    own += ["model=transformer", "model.blocks=1", "model.width=16", "train.batch_size=16", "train.steps=6"]
    return [*own, f"dataset.objective={objective}", "optimizer=adamw", "optimizer.global_clipnorm=1.0", *more]


def joint(kind):
    weights = [f"train.class_weights={WEIGHTS[kind]}"] if kind in WEIGHTS else []
    # Adam would magnify the rounding of gradients near 0.
    return words(kind, "data.uneven=pad", "optimizer=momentum", *weights)


@pytest.fixture(scope="module", params=[2, 3])
def found(request, tmp_path_factory):
    runs = {f"joint {kind}": joint(kind) for kind in KINDS}
    runs["joint augmented"] = [*AUGMENTED, "data.uneven=pad", "optimizer=momentum", "train.steps=6"]
    if request.param == 2:
        saved = ["checkpoint.every_steps=1", "checkpoint.keep=99", "train.validate_every_epochs=null"]
        for kind in KINDS:
            runs |= {kind: words(kind, *saved), f"{kind} in two": words(kind, *saved, "train.steps=5")}
            runs |= {f"{kind} in two/again": words(kind, *saved)}
        for name, where in (("augmented", "cpu"), ("on the device", "device")):
            own = [*AUGMENTED, *saved, "checkpoint.every_steps=3", f"data.augment_on={where}"]
            runs |= {name: [*own, "train.steps=12"], f"{name} in two": [*own, "train.steps=3"]}
            runs |= {f"{name} in two/again": runs[name]}
        for kind in TEXTS:
            runs |= {kind: text(kind, *saved), f"{kind} in two": text(kind, *saved, "train.steps=5")}
            runs |= {f"{kind} in two/again": text(kind, *saved)}
        runs["halves"] = text("causal", "train.precision=mixed_bfloat16")
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "text.txt").write_text(TEXT)
    return many_runs("mpirun", request.param, runs, folder, timeout=560)[0], folder, request.param


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_equal_keras_in_one_process_on_the_joint_batches(found, kind):
    """To 1e-5 in all weights, in the losses and in the metrics; with the corrections off they do not."""
    for rank in found[0]:
        result = rank[f"joint {kind}"]
        assert "error" not in result
        assert result["exact"] < 1e-5
        assert result["uncorrected"] > 1e-4
        for name, (ours, theirs) in result["metrics"].items():
            if name not in OF_OUTPUTS:
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_does_not_depend_on_how_examples_are_batched(found, kind):
    """Ranks with batches of 4 against one process with a single batch."""
    for name, (ours, theirs) in found[0][0][f"joint {kind}"]["tested"].items():
        if name not in OF_OUTPUTS and (kind, name) != ("custom", "loss"):  # Keras weights several losses by examples.
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", [*KINDS, *TEXTS])
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(found, kind):
    ran, folder, num_ranks = found
    if num_ranks != 2:
        return
    for name in (kind, f"{kind} in two", f"{kind} in two/again"):
        assert "record" in ran[0][name], ran[0][name]
    assert [ran[0][f"{kind} in two/again"]["record"][key] for key in ("first_step", "num_steps")] == [5, 6]
    whole, resumed = (
        load_file(folder / run / "checkpoints/step-00000006/state.safetensors") for run in (kind, f"{kind} in two")
    )
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(whole[name], resumed[name], equal_nan=True) for name in whole)
    assert ran[0][kind]["record"]["metrics"] == ran[0][f"{kind} in two/again"]["record"]["metrics"]


@pytest.mark.parametrize("name", ["augmented", "on the device"])
def test_an_augmented_run_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(found, name):
    ran, folder, num_ranks = found
    if num_ranks != 2:
        return
    for run in (name, f"{name} in two", f"{name} in two/again"):
        assert "record" in ran[0][run], ran[0][run]
    assert [ran[0][f"{name} in two/again"]["record"][key] for key in ("first_step", "num_steps")] == [3, 12]
    whole, resumed = (
        load_file(folder / run / "checkpoints/step-00000012/state.safetensors") for run in (name, f"{name} in two")
    )
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(whole[key], resumed[key], equal_nan=True) for key in whole)


def test_ranks_on_mixed_targets_equal_keras_in_one_process(found):
    for rank in found[0]:
        result = rank["joint augmented"]
        assert "error" not in result and result["exact"] < 1e-5
        for name, (ours, theirs) in [*result["metrics"].items(), *result["tested"].items()]:
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name


def test_records_have_the_metrics_of_the_task(found):
    ran, _, num_ranks = found
    if num_ranks == 2:
        metrics = {kind: ran[0][kind]["record"]["metrics"] for kind in KINDS}
        assert "test_mean_iou" in metrics["segmentation"] and "test_mean_absolute_error" in metrics["regression"]
        assert metrics["language"]["test_perplexity"] == pytest.approx(np.exp(metrics["language"]["test_loss"]))
        assert {"test_size_loss", "test_kind_loss", "test_size_mae"} < metrics["custom"].keys()


def test_a_text_is_learned_and_continued(found):
    ran, folder, num_ranks = found
    if num_ranks != 2:
        return
    causal, masked, halves = (ran[0][name]["record"] for name in ("causal", "masked", "halves"))
    assert causal == ran[1]["causal"]["record"] | {"seconds": causal["seconds"]}, "the same on every rank"
    assert causal["sample"].count("' -> ") == 1 and masked["sample"] is None
    assert causal["per_second"]["tokens"] == pytest.approx(8 * causal["examples_per_second"])
    assert 1 < halves["metrics"]["test_perplexity"] < 280 and masked["metrics"]["test_perplexity"] > 1
    tokenizers = {name: (folder / name / "tokenizer.model").read_bytes() for name in ("causal", "causal in two")}
    assert len(set(tokenizers.values())) == 1, "a resumed run has the same"
    assert json.loads((folder / "causal/model.json").read_text())["input"] == {"shape": [8], "dtype": "int32"}
