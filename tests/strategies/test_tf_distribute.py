"""The strategies of tf.distribute keep one contract: exact, the same as Horovod's ranks, resumed, and refused by name.

mirrored is two replicas in one process, multi_worker_mirrored is two real workers. Each makes its runs in one start, by
default those of a few tasks and settings; what reduces, counts and saves is the same for all of them. Each other task
or setting is tried with one of the two strategies nightly, and with the other before a release.
"""

import itertools
import json
import re

import numpy as np
import pytest

from launching import many_runs, without_hvtrain
from run_results import different, history, record, state
from tiers import with_nightly

# Nightly, two starts with some thirty runs each.
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
]
nightly, release = pytest.mark.nightly, pytest.mark.release

WORDS = {
    "mirrored": ["strategy=mirrored", "strategy.num_replicas=2"],
    "multi_worker_mirrored": ["strategy=multi_worker_mirrored"],
}
WITHOUT_REDUCTION = {"mirrored": "ForgetfulReplicas", "multi_worker_mirrored": "ForgetfulWorkers"}
# Each changes weights 20 times. Adam would magnify the rounding of gradients near 0, so it has no Embedding.
JOINT = {
    "classification": [
        "optimizer=adamw",
        "optimizer.global_clipnorm=0.5",
        "train.class_weights=balanced",
        "train.rates={dense:0.5}",  # Also of the weight decay.
    ],
    "regression": ["optimizer=momentum"],  # With weights of examples.
    "language": ["optimizer=momentum"],  # With an Embedding, and masked.
    "custom": [
        "optimizer=momentum"
    ],  # With inputs and outputs by name, ignored labels and an added loss.
}
CUSTOM = [
    "task.loss={size: {_target_: keras.losses.MeanSquaredError}, "
    "kind: {_target_: keras.losses.SparseCategoricalCrossentropy, from_logits: true, ignore_class: -1}}",
    "task.loss_weights={kind: 0.5}",
]
SAVED = ["checkpoint.every_steps=1", "checkpoint.keep=99", "train.validate_every_epochs=null"]
TEXT = "\n\n".join(f"{i}: " + " ".join(f"{i * j % 17:04b}" for j in range(40)) for i in range(24))
# Runs of which every strategy gives the same results. What is drawn by chance is each replica's own.
SAME = {
    "text": [
        *[
            "task=language",
            "dataset=text",
            "dataset.file=text.txt",
            "dataset.vocabulary_size=280",
            "dataset.length=8",
        ],
        *[
            "model=transformer",
            "model.blocks=1",
            "model.width=16",
            "train.batch_size=16",
            "optimizer=adamw",
        ],
    ],
    "norm": ["model.norm=true", "dataset.num_validation=40"],
    "parts": ["train.rates={hidden*:0.5}", "train.ema=0.9", "dataset.num_validation=40"],
}
MORE = {
    "half": ["train.precision=mixed_float16"],
    "mixed targets": ["dataset=digits", "model=mlp", "augment=[random_translation,mix_up]"],
}
DIGITS = ["dataset=digits", "model=cnn", "train.epochs=8"]
LOADED = """
import keras
model = keras.models.load_model({path!r})
print(type(model).__module__.split(".")[0])
"""
both = pytest.mark.parametrize("strategy", WORDS)
BY_DEFAULT = ("classification", "norm")
# An Embedding's rows and masks with both; what else there is with one of them.
NIGHTLY = {
    "mirrored": ("language", "one number", "text in two", "half"),
    "multi_worker_mirrored": (
        "language",
        "regression",
        "custom",
        "norm in two",
        "parts",
        "mixed targets",
        "digits",
    ),
}


def on_both(names):
    """Parameters: each strategy with each name, in the tier that the two have."""
    parameters = []
    for strategy, name in itertools.product(WORDS, names):
        later = nightly if name in NIGHTLY[strategy] else release
        parameters.append(pytest.param(strategy, name, marks=() if name in BY_DEFAULT else later))
    return parameters


def selected(request, strategy):
    """Names of the strategy's runs, or of their tasks, that the selected tests read."""
    items = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return {
        names["name"]
        for names in parameters
        if names.get("strategy") == strategy and "name" in names
    }


def six_steps(own):
    return [*own, *SAVED, "train.steps=6"]


def words(kind, *more):
    own = [
        f"task={kind}",
        "dataset._target_=kinds.data",
        "model._target_=kinds.model",
        "train.batch_size=8",
    ]
    own += [f"++dataset.kind={kind}", f"++model.kind={kind}", "optimizer.learning_rate=0.05"]
    return [*own, *(CUSTOM if kind == "custom" else []), *more]


def joint_runs(strategy):
    """Against one process on the joint batches. Workers may have batches that differ in size, replicas not."""
    more = [
        *WORDS[strategy],
        "train.steps=20",
        *(["data.uneven=pad"] if strategy == "multi_worker_mirrored" else []),
    ]
    runs = {f"joint {kind}": words(kind, *own, *more) for kind, own in JOINT.items()}
    runs["joint one number"] = [
        *words("multilabel", "optimizer=momentum", *more),
        "++task.loss={_target_: replicas.OneNumber}",
    ]
    runs["joint forgetful"] = [
        *runs["joint regression"],
        f"strategy._target_=replicas.{WITHOUT_REDUCTION[strategy]}",
    ]
    return runs


def runs_of(strategy, names):
    """Runs by name: against one process, whole ones, one in two starts, and refused ones."""
    ours = WORDS[strategy]
    runs = {
        **joint_runs(strategy),
        **{name: [*six_steps(own), *ours] for name, own in {**SAME, **MORE}.items()},
        "accumulates": ["train.accumulate=2", *ours],
        "by xla": ["train.jit_compile=true", *ours],
        "own step": words("regression", "model._target_=replicas.model", *ours),
        "digits": [*DIGITS, *ours],
    }
    for name in ("text", "norm"):
        runs |= {
            f"{name} in two": [*runs[name], "train.steps=5"],
            f"{name} in two/again": runs[name],
        }
    wholes = {name.removesuffix(" in two") for name in names}
    chosen = {*names, *wholes, *BY_DEFAULT, "forgetful"}
    return {
        name: own
        for name, own in runs.items()
        if name.removeprefix("joint ").partition("/")[0] in chosen
    }


REFUSED = [
    ("accumulates", r"strategy=\w+ and train.accumulate exclude each other"),
    ("by xla", r"strategy=\w+ and train.jit_compile exclude each other; leave one of them out"),
    (
        "own step",
        r"needs Keras's own train_step and compute_loss, .* but OwnStep has its own train_step; choose",
    ),
]
REFUSED_BY_REPLICAS = [
    ("nan", r"the gradient of step \d+ is not finite on rank 0; it did not reach the weights"),
    (
        "pads",
        r"strategy=mirrored divides the batch of each step equally among 2 replicas, but .* choose data.uneven=trim",
    ),
    (
        "synced",
        r"train.sync_batch_norm=true normalizes over ranks, and this strategy has 2 replicas in one process",
    ),
]


@pytest.fixture(scope="module")
def workers(request, tmp_path_factory):
    """(what each rank saw, folder) of two ranks: multi_worker_mirrored, and what Horovod gives for comparison."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "text.txt").write_text(TEXT)
    ours = WORDS["multi_worker_mirrored"]
    names = selected(request, "multi_worker_mirrored")
    runs = runs_of("multi_worker_mirrored", names)
    compared = names | selected(request, "mirrored") | {"norm"}
    runs |= {
        f"horovod {name}": six_steps(own)
        for name, own in {**SAME, **MORE}.items()
        if name in compared
    }
    if with_nightly(request):
        runs |= {
            "to horovod": [*runs["norm"], "train.steps=5"],
            "to horovod/again": runs["horovod norm"],
        }
        runs |= {
            "from horovod": [*runs["horovod norm"], "train.steps=5"],
            "from horovod/again": runs["norm"],
        }
        runs["horovod for replicas"] = [*runs["horovod norm"], "train.steps=5"]
    runs["nan"] = ["model.nan_on_rank=1", "checkpoint.every_steps=2", *ours]
    runs["stops"] = [
        "train.epochs=3",
        "+callbacks.s={_target_: leaves.Stops, rank: 1, batch: 2}",
        *ours,
    ]
    return many_runs("mpirun", 2, runs, folder, timeout=800)[0], folder


@pytest.fixture(scope="module")
def replicas(request, workers, tmp_path_factory):
    """(what the process saw, folder) of two replicas: mirrored, which also goes on where ranks of Horovod stopped."""
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "text.txt").write_text(TEXT)
    ours = WORDS["mirrored"]
    runs = runs_of("mirrored", selected(request, "mirrored"))
    if with_nightly(request):
        runs["to horovod"] = [*runs["norm"], "train.steps=5"]
        runs["from horovod"] = [*runs["norm"], f"run.dir={workers[1] / 'horovod for replicas'}"]
    runs["unlike"] = [*six_steps(SAME["norm"]), "train.batch_size=[8,24]", *ours]
    runs["nan"] = ["model.nan_on_rank=0", "checkpoint.every_steps=2", *ours]
    runs["pads"] = ["data.uneven=pad", *ours]
    runs["synced"] = ["model.norm=true", "train.sync_batch_norm=true", *ours]
    return many_runs(None, 1, runs, folder, timeout=800)[0], folder


@pytest.fixture
def results(request, strategy):
    """(what each rank saw, folder) of the strategy's runs."""
    return request.getfixturevalue(
        {"mirrored": "replicas", "multi_worker_mirrored": "workers"}[strategy]
    )


def largest_gap(first, second):
    """Of the weights of two checkpoints, relative to the largest value of each."""
    names = [name for name in first if name.startswith("model/")]
    return max(
        float(np.max(np.abs(first[n] - second[n])) / max(np.max(np.abs(first[n])), 1e-6))
        for n in names
    )


@pytest.mark.parametrize(("strategy", "name"), on_both([*JOINT, "one number"]))
def test_twenty_steps_equal_one_process_on_the_joint_batches(results, strategy, name):
    """With weights, masks, clipping, rows of an Embedding, inputs by name and losses that layers add."""
    for rank in results[0]:
        result = rank[f"joint {name}"]
        assert result["exact"] < 1e-5
        assert len(result["sizes"][0]) == 20
        if name in ("language", "custom") or (strategy, name) == (
            "multi_worker_mirrored",
            "regression",
        ):
            assert result["uncorrected"] > 1e-4, "the masks, labels or weights of the two differ"


@both
def test_without_the_reduction_they_do_not(results):
    assert results[0][0]["joint forgetful"]["exact"] > 1e-3


@pytest.mark.parametrize(("strategy", "name"), on_both([*SAME, *MORE]))
def test_a_run_gives_what_horovod_gives(results, workers, strategy, name):
    """With dropout, batch normalization, parts at other rates, averages, half precision and mixed targets."""
    ours, expected = record(results[0], name), record(workers[0], f"horovod {name}")
    # Replicas draw other masks of dropout and other mixtures than ranks do.
    is_loose = name == "half" or (strategy == "mirrored" and name in ("text", "mixed targets"))
    assert ours["metrics"] == pytest.approx(expected["metrics"], rel=0.2 if is_loose else 1e-3)
    assert (
        ours["global_batch"] == expected["global_batch"]
        and ours["reductions"] == expected["reductions"]
    )
    if strategy == "multi_worker_mirrored":
        # TensorFlow's bytes are not known, and its weights are not compared.
        unlike = {"weight_checks": 0, "sent_bytes": 0}
        assert {**ours["proof"], **unlike} == {**expected["proof"], **unlike}
    if not is_loose:
        assert (
            largest_gap(state(workers[1] / f"horovod {name}", 6), state(results[1] / name, 6))
            < 1e-3
        )


@pytest.mark.parametrize(("strategy", "name"), on_both(["text in two", "norm in two"]))
def test_it_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(results, strategy, name):
    """With dropout's seeds and moving statistics of each replica or worker."""
    assert record(results[0], f"{name}/again")["first_step"] == 5
    whole = state(results[1] / name.removesuffix(" in two"), 6)
    assert different(whole, state(results[1] / name, 6)) == []


@nightly
def test_replicas_go_on_where_ranks_of_horovod_stopped(replicas, workers):
    assert record(replicas[0], "from horovod")["first_step"] == 5
    assert (
        largest_gap(
            state(workers[1] / "horovod norm", 6), state(workers[1] / "horovod for replicas", 6)
        )
        < 1e-4
    )


@nightly
@pytest.mark.parametrize("name", ["to horovod", "from horovod"])
def test_workers_go_on_where_horovod_stopped_and_the_other_way_round(workers, name):
    assert record(workers[0], f"{name}/again")["first_step"] == 5
    assert largest_gap(state(workers[1] / "horovod norm", 6), state(workers[1] / name, 6)) < 1e-4


@both
def test_a_run_leaves_what_every_run_leaves(results, workers):
    ours, expected = results[1] / "norm", workers[1] / "horovod norm"
    assert {path.name for path in ours.iterdir()} == {path.name for path in expected.iterdir()}
    records = [json.loads((run / "result.json").read_text()) for run in (ours, expected)]
    assert records[0].keys() == records[1].keys()
    heads = [(run / "history.csv").read_text().splitlines()[0] for run in (ours, expected)]
    assert heads[0] == heads[1]


def test_a_process_with_two_replicas_counts_them(replicas):
    """Batches of ranks that differ in size are cut evenly."""
    result = json.loads((replicas[1] / "norm/result.json").read_text())
    assert (result["global_batch"], result["num_ranks"], result["num_replicas"]) == (64, 1, 2)
    assert record(replicas[0], "unlike")["global_batch"] == 32


def test_a_gradient_that_is_not_finite_is_named_and_one_rank_stops_all(workers):
    for rank in workers[0]:
        assert "is not finite on rank 1; it did not reach the weights" in rank["nan"]["error"]
    assert [rank["stops"]["record"]["num_steps"] for rank in workers[0]] == [4, 4]


@pytest.mark.parametrize(
    ("strategy", "name", "message"),
    [
        *((strategy, *case) for strategy in WORDS for case in REFUSED),
        *(("mirrored", *case) for case in REFUSED_BY_REPLICAS),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(results, strategy, name, message):
    for rank in results[0]:
        assert re.search(message, rank[name]["error"])


@nightly
def test_ranks_of_horovod_go_on_where_replicas_stopped(replicas, workers):
    again = many_runs("mpirun", 2, {"to horovod/again": six_steps(SAME["norm"])}, replicas[1])[0]
    assert record(again, "to horovod/again")["first_step"] == 5
    assert (
        largest_gap(state(workers[1] / "horovod norm", 6), state(replicas[1] / "to horovod", 6))
        < 1e-4
    )


@pytest.mark.parametrize(("strategy", "name"), on_both(["digits"]))
def test_the_digits_are_learned_and_plain_keras_loads_the_model(results, name):
    assert record(results[0], name)["test_accuracy"] > 0.95
    assert len(history(results[1] / "digits")) == 8
    path = str(results[1] / "digits/model.keras")
    assert without_hvtrain(LOADED.format(path=path), cwd=results[1]).strip() == "keras"
