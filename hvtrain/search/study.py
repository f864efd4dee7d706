"""The study of a sweep: optuna's, in a file of the output folder, so that it survives the process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvtrain.core.files import refuse_link
from hvtrain.errors import ConfigError, LostRankError, in_one_line
from hvtrain.search.search_space import MAX, SearchSpace, Setting

STUDY_FILE = "sweep.db"
FIRST_PRUNED_EPOCH = 2  # The first is often that of the warm-up.
ERROR = "error"
# Different values that it takes to tell which settings matter.
LEAST_TO_COMPARE = 8

# Takes an epoch and its value, and says whether to prune the trial.
IsHopeless = Callable[[int, float], bool]
# Takes a trial's number and settings; returns its value, or None if it was pruned.
RunTrial = Callable[[int, dict[str, Any], IsHopeless], float | None]


class Study:
    """The trials of one search space.

    A trial that was interrupted is no result: its settings are tried again. One that failed counts.

    Args:
        folder: of the study's file.
        space: the searched settings.
        facts: what all trials have in common: metric, direction, ranks, settings.
        seed: of the choice of settings.
        prune_after: number of finished trials by whose median later ones are pruned; None: none is.

    Raises:
        ConfigError: the folder holds another sweep, or something else.
    """

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        facts: Mapping[str, Any],
        seed: int,
        prune_after: int | None,
    ) -> None:
        import optuna

        # Its own lines would stand between those of the sweep.
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._states = optuna.trial.TrialState
        self._space = space
        self._distributions = {name: _distribution(setting) for name, setting in space.settings.items()}
        self._study = _open_study(folder, facts)

        # No other process runs a trial: the folder is locked. These were left behind by a killed sweep.
        for trial in self._trials_in(self._states.RUNNING):
            self._try_again_later(trial)

        # The same seed again would draw the same settings again.
        self._study.sampler = optuna.samplers.TPESampler(seed=seed + len(self._study.trials))
        # Optuna's default prunes too.
        self._study.pruner = optuna.pruners.NopPruner()
        if prune_after is not None:
            self._study.pruner = optuna.pruners.MedianPruner(prune_after, n_warmup_steps=FIRST_PRUNED_EPOCH)

    def trials(self) -> list[Any]:
        """Returns trials with a result, in their order: finished, pruned and failed ones."""
        states = self._states
        ended = self._trials_in(states.COMPLETE, states.PRUNED, states.FAIL)
        # Optuna has no state for an interrupted trial, so that one has failed without an error.
        return [trial for trial in ended if trial.state != states.FAIL or ERROR in trial.user_attrs]

    def settings(self, trial: Any) -> dict[str, Any]:
        """Returns the searched settings of a trial."""
        values = {}
        for name, value in trial.params.items():
            choices = self._space.settings[name].get("choices")
            values[name] = choices[value] if choices else value

        return values

    def importances(self) -> dict[str, float]:
        """Returns the share of each setting in the variance of finished trials (fANOVA, Hutter et al. 2014).

        Empty if the trials are too few, or their values equal.
        """
        values = {trial.value for trial in self._trials_in(self._states.COMPLETE)}
        if len(values) < LEAST_TO_COMPARE:
            return {}
        importance = self._optuna.importance
        # Its trees are random; with a seed the same trials give the same shares.
        evaluator = importance.FanovaImportanceEvaluator(seed=0)
        shares = importance.get_param_importances(self._study, evaluator=evaluator)

        return {name: float(share) for name, share in shares.items()}

    def try_next(self, run: RunTrial) -> Any:
        """Runs the next trial, and returns it after its end.

        A LostRankError of `run` makes it a failed one. Whatever else `run` raises is raised here
        too.
        """
        trial = self._study.ask(self._distributions)

        def is_hopeless(epoch: int, value: float) -> bool:
            trial.report(value, epoch)
            return trial.should_prune()

        try:
            value = run(trial.number, self.settings(trial), is_hopeless)
        except LostRankError as error:
            # The settings may be the cause, such as a batch that does not fit, so this is a result.
            trial.set_user_attr(ERROR, str(error))
            return self._study.tell(trial.number, state=self._states.FAIL)
        except BaseException:  # A Ctrl-C, a signal, or a mistake of the user that ends the sweep.
            self._try_again_later(trial)
            raise

        if value is None:
            return self._study.tell(trial.number, state=self._states.PRUNED)

        return self._study.tell(trial.number, value, state=self._states.COMPLETE)

    def _try_again_later(self, trial: Any) -> None:
        # Nothing of its run is used again; the next trial takes the same settings.
        self._study.tell(trial.number, state=self._states.FAIL)
        self._study.enqueue_trial(trial.params)

    def _trials_in(self, *states: Any) -> list[Any]:
        return self._study.get_trials(deepcopy=False, states=states)


def _distribution(setting: Setting) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if "choices" in setting:
        return CategoricalDistribution(range(len(setting["choices"])))  # Optuna stores no lists.
    is_whole = isinstance(setting["low"], int) and isinstance(setting["high"], int)
    distribution = IntDistribution if is_whole else FloatDistribution

    return distribution(**setting)


def _open_study(folder: Path, facts: Mapping[str, Any]) -> Any:
    """Opens the study in the folder, or makes a new one with these facts."""
    import optuna

    path = folder / STUDY_FILE
    refuse_link(path, ConfigError, "choose another --output")
    # The lock of the folder is a hidden file.
    has_files = folder.exists() and any(not file.name.startswith(".") for file in folder.iterdir())
    if has_files and not path.exists():
        raise ConfigError(f"--output {folder} is not empty and holds no sweep; choose another folder")
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{path}",
            study_name="sweep",
            direction="maximize" if facts["direction"] == MAX else "minimize",
            load_if_exists=True,
        )
    except Exception as error:  # sqlalchemy and sqlite have errors of many kinds.
        raise ConfigError(
            f"{path} cannot be used as the file of a sweep: {in_one_line(error)}; choose another --output"
        ) from error

    known = study.user_attrs

    for name, value in facts.items():
        if known.get(name, value) != value:
            raise ConfigError(
                f"--output {folder} holds a sweep of other settings: {name} was {known[name]} and is {value}; "
                "choose another folder, or give the same"
            )

    for name in facts.keys() - known.keys():
        study.set_user_attr(name, facts[name])

    return study
