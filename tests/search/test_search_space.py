"""What a sweep searches, what it looks for, and how its study goes on. No run is started."""

import json
import sys
from pathlib import Path

import pytest

from hvtrain.config.compose import compose, override
from hvtrain.config.schema import from_dict
from hvtrain.errors import BusyError, ConfigError
from hvtrain.search.search_space import Goal, goal_of, read_space
from hvtrain.search.study import as_overrides, sort_trials
from hvtrain.search.sweep import main
from hvtrain.system.run_files import EpochRecord
from hvtrain.system.run_lock import RunLock
from hvtrain.system.secrets import command_line

DATA = "dataset.num_validation=100"


def space(folder: Path, text: str):
    (folder / "own.yaml").write_text(text)
    return read_space(str(folder / "own.yaml"), [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "defines no settings"),
        ("seed: [1", "cannot be read"),
        ("seed: 3", "seed is 3, which does not define a search; write {low: 1, high: 9}"),
        ("seed: {low: 1, high: 2, 0: 3}", "seed is {'low': 1, 'high': 2, 0: 3}, which does not"),
        ("seed: {low: 1, hihg: 2}", "write {low: 1, high: 9}, with log: true or a step"),
        ("seed: {low: 1}", "seed is {'low': 1}, which does not define a search; write {low: 1"),
        ("seed: {low: 2, high: 1}", "low 2 is not below high 1; widen the range"),
        ("seed: {low: many, high: 1}", "seed is {'low': 'many', 'high': 1}, which does not"),
        ("seed: {low: true, high: 2}", "seed is {'low': True, 'high': 2}, which does not"),
        ("seed: {low: .nan, high: 2}", "seed is {'low': nan, 'high': 2}, which does not"),
        ("seed: {low: 0, high: 1, log: true}", "but log needs a low above 0 and no step"),
        ("seed: {low: 0.0, high: 1.0, step: 0.3}", "steps of 0.3 do not lead from 0 to 1"),
        ("seed: {choices: []}", "seed is {'choices': []}, which does not"),
        ("seed: {choices: [1], log: true}", "seed is {'choices': [1], 'log': True}, which does"),
        ("seed: {choices: [{a: 1}]}", "seed is {'choices': [{'a': 1}]}, which does not"),
    ],
)
def test_a_space_that_is_none_is_refused_in_one_line(text, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        space(tmp_path, text)
    assert (
        message in str(caught.value)
        and str(tmp_path) in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_examples_reach_both_ends_and_every_choice(tmp_path):
    searched = space(
        tmp_path, "a.b: {low: 1e-4, high: 1e-1, log: true}\nc: {choices: [null, x, [1, 2]]}\n"
    )
    assert searched.settings == {
        "a.b": {"low": 1e-4, "high": 1e-1, "log": True},
        "c": {"choices": [None, "x", [1, 2]]},
    }
    assert [tuple(example.values()) for example in searched.examples()] == [
        (1e-4, None),
        (1e-1, "x"),
        (1e-4, [1, 2]),
    ]


def test_the_ready_space_fits_every_optimizer(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sweep"])
    for optimizer in ("adam", "momentum"):
        for example in read_space("optimizer", []).examples():
            arguments = [override(name, value) for name, value in example.items()]
            config = from_dict(compose([f"optimizer={optimizer}", *arguments]))
            assert config.optimizer["learning_rate"] == example["optimizer.learning_rate"]
            assert config.train.batch_size == example["train.batch_size"]


@pytest.mark.parametrize(
    "value",
    [3, 2.5e-7, True, None, "adam", "it's 5 o'clock, \\ is it?", "\\' \\", ["a b", 1, [2.0]]],
)
def test_hydra_reads_a_word_as_the_value_it_was_made_of(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(override("model.given", value)).value() == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([DATA], "sweep=SPACE is missing; name a search space, such as sweep=optimizer"),
        (["sweep=optimiser"], "sweep=optimiser is not a search space; did you mean 'optimizer'?"),
        (["sweep=none.yaml"], "none.yaml cannot be read: FileNotFoundError: "),
        (["sweep=optimizer", "trials=0"], "trials=0 is not a whole number of at least 1"),
        (
            ["sweep=optimizer", "run.dir=a"],
            "run.dir=a was given, but each trial has its own run folder",
        ),
        (["sweep=optimizer", "train.batch_size=8"], "train.batch_size=8 was given, but"),
        (["sweep=own.yaml", DATA], "unknown setting 'train.epoch'; did you mean 'train.epochs'?"),
        (["sweep=wide.yaml", DATA], "train.batch_size=0 is out of range; it must be at least 1"),
        (["sweep=optimizer", "modle=cnn"], "unknown setting 'modle'; did you mean 'model'?"),
        (
            ["sweep=optimizer"],
            "dataset.num_validation=0 or train.validate_every_epochs=null leaves no val_accuracy",
        ),
        (["sweep=optimizer", DATA, "--output", "used"], "is not empty and holds no sweep"),
        (["sweep=optimizer", DATA, "--output", "broken"], "cannot be used as the file of a sweep"),
        (["sweep=optimizer", "-np", "0"], "0 is not a whole number of at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line_before_anything_starts(
    arguments, message, tmp_path, monkeypatch
):
    pytest.importorskip("optuna", reason="optuna is not installed; ./scripts/run pytest does it")
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("train.epoch: {low: 1, high: 3}\n")
    Path("wide.yaml").write_text("train.batch_size: {low: 0, high: 64}\n")
    for name in ("used/mine", "broken/sweep.db"):
        Path(name).parent.mkdir()
        Path(name).write_text("mine")
    monkeypatch.setattr(sys, "argv", ["sweep", *arguments])
    with pytest.raises(ConfigError) as caught:
        main()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list(Path().glob("*/trial-*"))


def test_a_sweep_has_its_folder_to_itself(tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="optuna is not installed; ./scripts/run pytest does it")
    monkeypatch.setattr(sys, "argv", ["sweep", "sweep=optimizer", DATA, "--output", str(tmp_path)])
    with RunLock() as lock:
        lock.take(tmp_path)
        with pytest.raises(
            BusyError, match="is in use by another sweep; wait for its end, or choose another"
        ):
            main()


def test_without_optuna_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("hvtrain.search.sweep.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["sweep", "sweep=optimizer", DATA])
    with pytest.raises(
        ConfigError, match=r"which is not installed; install it from scripts/lock/sweep\.txt"
    ):
        main()


def goal(*arguments: str, **options) -> Goal:
    return goal_of(from_dict(compose(["model=mlp", *arguments])), **options)


def test_the_goal_is_that_of_the_task_unless_another_is_given(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sweep"])
    assert goal(DATA) == Goal("val_accuracy", "max")
    assert goal(DATA, "task=regression") == Goal("val_mean_absolute_error", "min")
    assert goal(DATA, "task=language").direction == "min", "perplexity"
    assert goal(DATA, "checkpoint.best=val_loss", "train.validate_every_epochs=2") == Goal(
        "val_loss", "min", first_epoch=2
    )
    assert goal(metric="loss") == Goal("loss", "min"), "of training: it needs no validation data"
    assert goal(metric="loss", direction="max") == Goal("loss", "max", is_explicit=True)
    with pytest.raises(
        ConfigError, match="validate_every_epochs=null leaves no val_accuracy at the end of epochs"
    ):
        goal(DATA, "train.validate_every_epochs=null")
    with pytest.raises(
        ConfigError, match=r"names no best metric; give --metric NAME --direction max\|min"
    ):
        goal(DATA, "task.best=null")


def test_the_values_of_a_goal_are_those_of_epochs_that_have_it():
    history = [
        EpochRecord(1, 1, 0.1, 1, 1, {"loss": 1.0}),
        EpochRecord(2, 2, 0.1, 1, 1, {"loss": 1.0, "val_accuracy": 0.5}),
        EpochRecord(3, 3, 0.1, 1, 1, {"loss": 1.0, "val_accuracy": float("nan")}),
    ]
    validated = Goal("val_accuracy", "max", first_epoch=2)
    assert validated.values([]) == validated.values(history[:1]) == {}, "not yet"
    assert validated.values(history) == {2: 0.5}
    with pytest.raises(
        ConfigError,
        match=r"has no val_accuracy in its history\.csv, which has loss; give the data set",
    ):
        Goal("val_accuracy", "max").values(history[:1])


def test_the_task_knows_better_which_values_are_good():
    start = {"best": "val_closeness", "sign": -1}
    Goal("val_closeness", "min").check([start])
    Goal("val_closeness", "max", is_explicit=True).check([start])
    Goal("val_loss", "max").check([start])
    with pytest.raises(
        ConfigError,
        match="judging by its name, val_closeness is best at its max, but the task says min",
    ):
        Goal("val_closeness", "max").check([start])


def test_the_table_has_the_best_first_and_failures_last():
    trials = [
        {"number": 0, "state": "failed", "value": None},
        {"number": 1, "state": "finished", "value": 0.1},
        {"number": 2, "state": "pruned", "value": 0.9},
        {"number": 3, "state": "finished", "value": 0.2},
    ]
    assert [trial["number"] for trial in sort_trials(trials, "max")] == [3, 1, 2, 0]
    assert [trial["number"] for trial in sort_trials(trials, "min")] == [1, 3, 2, 0]


def test_the_line_that_repeats_the_best_has_no_secret():
    settings = as_overrides({"optimizer.learning_rate": 0.1, "model.hidden": [8]})
    line = command_line("launch", ["-np", "2", "--", "dataset.api_key=hunter2", *settings])
    assert line.startswith(
        "python -m hvtrain launch -np 2 -- 'dataset.api_key=***' optimizer.learning_rate=0.1 "
    )
    assert json.dumps("hunter2") not in line and line.endswith("'model.hidden=[8]'")
