"""The study of a sweep with a function in place of runs: how it searches, and goes on after any end."""

import pytest

from hvtrain.errors import ConfigError, LostRankError

pytest.importorskip("optuna", reason="optuna is not installed; ./scripts/run pytest does it")
from hvtrain.search.study import Study

SPACE = {
    "x": {"low": -1.0, "high": 3.0},
    "n": {"low": 1, "high": 9, "step": 2},
    "c": {"choices": [[1], [2, 3]]},
}
FACTS = {"direction": "max", "overrides": ["model=mlp"], "space": SPACE}


def study(folder, seed=0, prune_after=None, **facts):
    folder.mkdir(exist_ok=True)
    return Study(folder, {**FACTS, **facts}, seed, prune_after)


def worth(number, settings, should_prune):
    assert settings["n"] in (1, 3, 5, 7, 9) and settings["c"] in ([1], [2, 3])
    return -((settings["x"] - 1) ** 2)


def interrupted(number, settings, should_prune):
    raise KeyboardInterrupt


def test_it_finds_the_best_and_goes_on_after_an_end(tmp_path):
    first = study(tmp_path)
    assert first.importances() == {}, "too few"
    for _ in range(10):
        first.try_next(worth)
    then = study(tmp_path)
    assert [trial.params for trial in then.trials()] == [trial.params for trial in first.trials()]
    for _ in range(20):
        then.try_next(worth)
    trials = then.trials()
    assert len(trials) == 30 and max(trial.value for trial in trials) > -0.01
    drawn = [tuple(trial.params.values()) for trial in trials]
    assert len({values[0] for values in drawn}) == 30, "the seed does not repeat the first ones"
    shares = then.importances()
    assert (
        next(iter(shares)) == "x" and shares["x"] > 0.8 and sum(shares.values()) == pytest.approx(1)
    )


def test_a_failed_trial_counts_and_an_interrupted_one_is_tried_again(tmp_path):
    def fails(number, settings, should_prune):
        raise LostRankError("no memory")

    sweep = study(tmp_path)
    failed = sweep.try_next(fails)
    assert failed.user_attrs == {"error": "no memory"}
    with pytest.raises(KeyboardInterrupt):
        sweep.try_next(interrupted)
    assert [trial.number for trial in sweep.trials()] == [0]
    again = sweep.try_next(worth)
    assert again.number == 2 and again.params == sweep._study.trials[1].params


def test_a_trial_that_ran_when_the_sweep_was_killed_is_tried_again(tmp_path):
    sweep = study(tmp_path)
    running = sweep._study.ask(sweep._distributions)
    then = study(tmp_path, seed=5)
    assert then.trials() == [] and then._study.trials[0].state.name == "FAIL"
    assert then.try_next(worth).params == running.params


def test_a_trial_below_the_median_is_pruned_from_the_second_epoch_on(tmp_path):
    def trains(values):
        def run(number, settings, should_prune):
            verdicts = [should_prune(epoch, value) for epoch, value in enumerate(values, 1)]
            seen.append(verdicts)
            return None if any(verdicts) else max(values)

        return run

    seen: list = []
    sweep = study(tmp_path, prune_after=2)
    for values in ([0.5, 0.8], [0.1, 0.2], [0.4, 0.3], [0.2, 0.9]):
        sweep.try_next(trains(values))
    assert seen == [[False, False], [False, False], [False, True], [False, False]]
    pruned = sweep.trials()[2]
    assert pruned.state.name == "PRUNED" and pruned.value == 0.3


def test_a_sweep_of_other_settings_is_refused(tmp_path):
    study(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"holds a sweep of other settings \(overrides: \['model=mlp'\], not \['a'\]\)",
    ):
        study(tmp_path, overrides=["a"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other/sweep.db").symlink_to(tmp_path / "sweep.db")
    with pytest.raises(ConfigError, match=r"sweep\.db is a symbolic link"):
        study(tmp_path / "other")
