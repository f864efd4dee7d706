"""Each task on real ranks equals one process on the joint batches; and runs resume in mid-epoch with the same bits.

A resume does not depend on the loss, but on what carries state. So it is tested once for each kind of state: metrics
of several outputs, an augmentation's seeds in the input pipeline and on the device, dropout's seeds, and the seeds that
mask a text. tests/training/test_guards.py has moving statistics, tests/models an accumulation and averages.
"""

import json

import numpy as np
import pytest

from keras_metrics import metric_settings
from launching import many_runs
from run_results import different, record, state
from tiers import mostly_nightly, with_nightly, with_release

pytestmark = pytest.mark.distributed
nightly, release = pytest.mark.nightly, pytest.mark.release

WEIGHTS = {"classification": "balanced", "binary": "{0: 1.0, 1: 4.0}", "segmentation": "{1: 3.0}"}
CUSTOM = [
    "task.loss={size: {_target_: keras.losses.MeanSquaredError}, "
    "kind: {_target_: keras.losses.SparseCategoricalCrossentropy, from_logits: true, ignore_class: -1}}",
    "task.loss_weights={kind: 0.5}",
    "+task.metrics.size.mae._target_=keras.metrics.MeanAbsoluteError",
]
# Of which Keras logs the mean over batches, whatever their size.
OF_OUTPUTS = (
    "size_loss",
    "kind_loss",
)
# With weights of classes, labels that are masked, and tokens with weights: the ways in which a mean has a weight.
BY_DEFAULT = ["classification", "segmentation", "language"]
NIGHTLY_ON_THREE = ["segmentation"]
KINDS = [
    "classification",
    "binary",
    "multilabel",
    "regression",
    "segmentation",
    "language",
    "custom",
]
AUGMENTED = [
    "dataset=digits",
    "model=mlp",
    "train.batch_size=64",
    "augment=[random_translation,random_erasing,mix_up]",
]
TEXT = "\n\n".join(f"{i}: " + " ".join(f"{i * j % 17:04b}" for j in range(40)) for i in range(24))
SAVED = ["checkpoint.every_steps=1", "checkpoint.keep=99", "train.validate_every_epochs=null"]


def words(kind, *more):
    own = [
        f"task={kind}",
        "dataset._target_=kinds.data",
        "model._target_=kinds.model",
        "train.batch_size=8",
    ]
    own += [
        f"++dataset.kind={kind}",
        f"++model.kind={kind}",
        "train.epochs=2",
        "optimizer.learning_rate=0.05",
    ]
    return [*own, *(CUSTOM if kind == "custom" else []), *more]


def text(objective, *more):
    """A transformer with dropout, on tokens of a text that is read in each rank."""
    own = [
        "task=language",
        "dataset=text",
        "dataset.file=text.txt",
        "dataset.vocabulary_size=280",
        "dataset.length=8",
    ]
    own += [
        "model=transformer",
        "model.blocks=1",
        "model.width=16",
        "train.batch_size=16",
        "train.steps=6",
    ]
    return [
        *own,
        f"dataset.objective={objective}",
        "optimizer=adamw",
        "optimizer.global_clipnorm=1.0",
        *more,
    ]


def joint_runs(kinds):
    """Each kind against one process. Adam would magnify the rounding of gradients near 0."""
    runs = {}
    for kind in kinds:
        weights = [f"train.class_weights={WEIGHTS[kind]}"] if kind in WEIGHTS else []
        more = [*weights, *metric_settings(kind)]
        runs[f"joint {kind}"] = words(kind, "data.uneven=pad", "optimizer=momentum", *more)
    runs["joint augmented"] = [*AUGMENTED, "data.uneven=pad", "optimizer=momentum", "train.steps=6"]
    return runs


# Name -> the run's words, the step at which it is cut in two, and its last one. 4 steps are an epoch, 12 of AUGMENTED.
RESUMED = {
    "dropout": (
        [*AUGMENTED, *SAVED, "train.steps=6", "data.augment_on=device", "model.dropout=0.2"],
        3,
        6,
    ),
}
# Metrics of several outputs are saved like others; seeds in the input pipeline are a function of step and rank, which
# tests/data holds by default.
RESUMED_NIGHTLY = {
    "custom": (words("custom", *SAVED), 5, 6),
    "masked": (text("masked", *SAVED), 5, 6),
    "augmented": ([*AUGMENTED, *SAVED, "train.steps=6", "data.augment_on=cpu"], 3, 6),
}
# Transformers have the state of masked ones, less the mask's seeds.
RESUMED_FOR_RELEASE = {"causal": (text("causal", *SAVED), 5, 6)}


def start(num_ranks, runs, folder):
    (folder / "text.txt").write_text(TEXT)
    return many_runs("mpirun", num_ranks, runs, folder)[0]


# Nightly it takes more than a minute: some thirty runs, of which each traces its own graphs.
@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory):
    """(what each rank saw, folder)."""
    runs = joint_runs(KINDS if with_nightly(request) else BY_DEFAULT)
    resumed = {
        **RESUMED,
        **(RESUMED_NIGHTLY if with_nightly(request) else {}),
        **(RESUMED_FOR_RELEASE if with_release(request) else {}),
    }
    runs["causal"] = text("causal", *SAVED)
    for name, (own, cut, _) in resumed.items():
        runs |= {
            name: own,
            f"{name} in two": [*own, f"train.steps={cut}"],
            f"{name} in two/again": own,
        }
    if with_nightly(request):
        runs["halves"] = text("causal", "train.precision=mixed_bfloat16")
    folder = tmp_path_factory.mktemp("tasks")
    return start(2, runs, folder), folder


@pytest.fixture(scope="module")
def three_ranks(request, tmp_path_factory):
    """What each rank saw, and the folder."""
    folder = tmp_path_factory.mktemp("tasks-on-3")
    kinds = KINDS if with_release(request) else NIGHTLY_ON_THREE
    return start(3, joint_runs(kinds), folder), folder


@pytest.fixture
def ranks(request, num_ranks):
    return request.getfixturevalue(f"{num_ranks}_ranks")[0]


def on_ranks():
    """Parameters: two ranks by default with some kinds and nightly with all, three with one nightly."""
    for kind in KINDS:
        yield pytest.param("two", kind, marks=() if kind in BY_DEFAULT else nightly)
        later = nightly if kind in NIGHTLY_ON_THREE else release
        yield pytest.param("three", kind, marks=later)


on_ranks_with_each_kind = pytest.mark.parametrize(("num_ranks", "kind"), list(on_ranks()))


@on_ranks_with_each_kind
def test_ranks_equal_keras_in_one_process_on_the_joint_batches(ranks, kind):
    """To 1e-5 in all weights, in the losses and in the metrics; with the corrections off they do not."""
    for rank in ranks:
        result = rank[f"joint {kind}"]
        assert "error" not in result
        assert result["exact"] < 1e-5
        assert result["uncorrected"] > 1e-4
        for name, (ours, expected) in result["metrics"].items():
            if name not in OF_OUTPUTS:
                assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6), name


@on_ranks_with_each_kind
def test_an_evaluation_does_not_depend_on_how_examples_are_batched(ranks, kind):
    """Ranks with batches of 4 against one process with a single batch."""
    for name, (ours, expected) in ranks[0][f"joint {kind}"]["tested"].items():
        if name not in OF_OUTPUTS and (kind, name) != (
            "custom",
            "loss",
        ):  # Keras weights several losses by examples.
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_records_have_the_metrics_of_the_task(two_ranks):
    ranks, _ = two_ranks
    assert "mean_iou" in ranks[0]["joint segmentation"]["tested"]
    causal = record(ranks, "causal")["metrics"]
    assert causal["test_perplexity"] == pytest.approx(np.exp(causal["test_loss"]))


@nightly
def test_so_have_those_of_a_regression_and_of_several_outputs(two_ranks):
    ranks, _ = two_ranks
    assert "mean_absolute_error" in ranks[0]["joint regression"]["tested"]
    custom = record(ranks, "custom")["metrics"]
    assert {"test_size_loss", "test_kind_loss", "test_size_mae"} < custom.keys()


@pytest.mark.parametrize("num_ranks", mostly_nightly(["two", "three"], "two"))
def test_ranks_on_mixed_targets_equal_keras_in_one_process(ranks):
    for rank in ranks:
        result = rank["joint augmented"]
        assert "error" not in result and result["exact"] < 1e-5
        for name, (ours, expected) in [*result["metrics"].items(), *result["tested"].items()]:
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "name",
    [
        *mostly_nightly([*RESUMED, *RESUMED_NIGHTLY], *RESUMED),
        *(pytest.param(name, marks=release) for name in RESUMED_FOR_RELEASE),
    ],
)
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(two_ranks, name):
    ranks, folder = two_ranks
    _, cut, last = {**RESUMED, **RESUMED_NIGHTLY, **RESUMED_FOR_RELEASE}[name]
    whole, resumed = record(ranks, name), record(ranks, f"{name} in two/again")
    assert (
        record(ranks, f"{name} in two")["num_steps"],
        resumed["first_step"],
        resumed["num_steps"],
    ) == (
        cut,
        cut,
        last,
    )
    assert different(state(folder / name, last), state(folder / f"{name} in two", last)) == []
    assert whole["metrics"] == resumed["metrics"]


def test_a_text_is_learned_and_continued(two_ranks):
    ranks, folder = two_ranks
    causal = record(ranks, "causal")
    assert causal == ranks[1]["causal"]["record"] | {"seconds": causal["seconds"]}, (
        "the same on every rank"
    )
    assert causal["sample"].count("' -> ") == 1
    assert causal["per_second"]["tokens"] == pytest.approx(8 * causal["examples_per_second"])
    assert json.loads((folder / "causal/model.json").read_text())["input"] == {
        "shape": [8],
        "dtype": "int32",
    }


@nightly
def test_a_text_is_learned_in_half_precision(two_ranks):
    assert 1 < record(two_ranks[0], "halves")["metrics"]["test_perplexity"] < 280


@nightly
def test_a_resumed_run_has_the_same_tokenizer(two_ranks):
    _, folder = two_ranks
    tokenizers = {
        (folder / name / "tokenizer.model").read_bytes() for name in ("masked", "masked in two")
    }
    assert len(tokenizers) == 1


@nightly
def test_a_masked_text_is_learned_and_has_no_sample(two_ranks):
    masked = record(two_ranks[0], "masked")
    assert masked["metrics"]["test_perplexity"] > 1 and masked["sample"] is None
