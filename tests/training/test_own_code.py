"""Mistakes in a user's own code: one line that names what was needed, or the exception with the user's own line."""

import re
from pathlib import Path

import pytest

from launching import ROOT, many_runs, train
from run_results import steps

CODE = ROOT / "tests/support/own/careless/__init__.py"
# What the one line says of a mistake that is found before training.
REFUSED = {
    "model none": "model._target_=careless.model returned None; it must return a keras.Model",
    "model five": "has 1 output(s) of shape (None, 5) and needs one of (None, 4), logits for leaves; "
    "end it with keras.layers.Dense(4)",
    "model two outputs": "has 2 output(s) of shape (None, 4), (None, 4) and needs one of (None, 4)",
    "model takes two": "must take one input, images of shape (6, 6, 1) as leaves gives them; it failed with TypeError",
    "model other size": "expected shape=(None, 28, 28, 1), found shape=(None, 6, 6)",
    "model fails": "it failed with ZeroDivisionError: in call ({in call}); tracebacks=true shows its traceback",
    "data none": "dataset._target_=careless.data returned None; it must return an hvtrain.data.Source; "
    "hvtrain.data.from_arrays(images, labels) makes one",
    "data dataset": "returned a _RangeDataset; it must return an hvtrain.data.Source",
    "data missing": "failed: FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.npy' ({missing}); trace",
    "data value": "failed: ValueError: cannot reshape array of size 7 into shape (3,4) ({value}); tracebacks=true",
    "data gap": "has no value in row 2; fill the gap or drop the row",
}
# What sums up the traceback of an exception in training: how it begins, and the mark of its line.
FAILED = {
    "model trace": ("KeyError: a leaf", "trace"),
    "model run": ("RuntimeError: a leaf fell off", "run"),
    "model check": ("InvalidArgumentError: assertion failed: [too bright]", "check"),
    "model loss": ("TypeError: Only integers, slices", "loss"),
    "data trace": ("IndexError: no such pixel", "mapped"),
    "data run": (
        "RuntimeError: a leaf fell off",
        "",
    ),  # Converted by AutoGraph within another function.
    "callback": ("AttributeError: no leaf", "callback"),
}
BROKEN = (
    "failed: ModuleNotFoundError: No module named 'no_such_package' "
    "({folder}/broken.py, line 3); tracebacks=true shows"
)
WORK = ["model subclassed", "model unbuilt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("careless")


@pytest.fixture(scope="module")
def ran(folder):
    runs = {
        "callback": ["+callbacks.own._target_=careless.Callback"],
        "module": ["model._target_=careless.broken.f"],
        # NaN from step 6 on.
        "not finite": [
            "strategy=single",
            "model.nan_on_rank=0",
            "checkpoint.every_steps=2",
            "train.steps=8",
        ],
    }
    for name in [*REFUSED, *FAILED, *WORK]:
        kind, _, how = name.partition(" ")
        group = {"model": "model", "data": "dataset"}.get(kind)
        if group:
            runs[name] = [f"{group}._target_=careless.{kind}", f"+{group}.how='{how}'"]
    return many_runs(
        None, 1, {name: ["train.steps=2", *settings] for name, settings in runs.items()}, folder
    )[0][0]


def test_weights_that_are_not_finite_are_not_saved(ran, folder):
    message = "TrainingError: weights are not finite after step 6, so no checkpoint of it is written; the last"
    assert ran["not finite"]["error"].startswith(message)
    assert steps(folder / "not finite") == [2, 4]


def with_places(message):
    """The message with {mark} as the line of the user's code that ends with that comment."""
    lines = enumerate(CODE.read_text().splitlines(), start=1)
    places = {
        line.rpartition("  # ")[2]: f"{CODE}, line {number}"
        for number, line in lines
        if "  # " in line
    }
    return re.sub(r"\{(.*?)\}", lambda mark: places[mark[1]], message)


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_in_one_line(ran, name):
    kind, _, message = ran[name]["error"].partition(": ")
    assert kind in ("ConfigError", "DataError") and "\n" not in message
    assert with_places(REFUSED[name]) in message


def test_a_module_that_cannot_be_imported_is_named_with_its_line(ran):
    assert BROKEN.format(folder=CODE.parent) in ran["module"]["error"]


@pytest.mark.parametrize("name", FAILED)
def test_an_exception_is_named_with_the_users_own_line(ran, name):
    message, mark = FAILED[name]
    assert ran[name]["error"].startswith(message)
    assert ran[name]["error"].endswith(
        with_places(f"({{{mark}}})") if mark else "(the function turn)"
    )


def test_an_unbuilt_model_is_built_and_saved_as_far_as_it_can_be(ran, folder):
    assert [ran[name]["record"]["num_parameters"] for name in WORK] == [6 * 6 * 4 + 4] * 2
    saved = {
        name: [path.name for path in (folder / name).glob("model.*") if path.suffix != ".json"]
        for name in WORK
    }
    assert saved == {"model subclassed": ["model.weights.h5"], "model unbuilt": ["model.keras"]}


def test_the_last_line_of_a_command_is_the_users_mistake(tmp_path):
    """After the whole traceback, which an exception of hvtrain itself needs too."""
    own = [
        "--config-dir",
        str(ROOT / "tests/support/own/conf"),
        "dataset=leaves",
        "strategy=single",
        "train.steps=2",
    ]
    arguments = [
        "model=tiny",
        "model._target_=careless.model",
        "+model.how=run",
        f"run.dir={tmp_path / 'run'}",
    ]
    code, output = train(
        None, 1, *own, *arguments, cwd=tmp_path, PYTHONPATH=f"{Path(CODE).parents[1]}:{ROOT}"
    )
    lines = output.splitlines()
    assert code == 1 and "Traceback (most recent call last):" in lines
    expected = with_places("RuntimeError: a leaf fell off ({run}); see its traceback above")
    assert re.fullmatch(rf"hvtrain: rank 0 on \S+ failed: {re.escape(expected)}", lines[-1])
