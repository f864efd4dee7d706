"""The study of a sweep: optuna's, in a file of the output folder, which goes on after any end of the process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvtrain.core.records import refuse_link
from hvtrain.errors import ConfigError, LostRankError, in_one_line
from hvtrain.search.search_space import SearchSpace, Setting

STUDY_FILE = "sweep.db"
FIRST_PRUNED_EPOCH = 2  # The first is often that of the warm-up.
ERROR = "error"
LEAST_TO_COMPARE = 8


class Study:
    """The trials of one search space.

    A trial that was interrupted is no result: its settings are tried again. One that failed counts.

    facts: what all its trials have in common. prune_after: finished trials by whose median later ones are pruned; None:
    none is pruned. Raises ConfigError if the folder holds another sweep.
    """

    def __init__(
        self, folder: Path, space: SearchSpace, facts: Mapping[str, Any], seed: int, prune_after: int | None
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._distributions = {name: _distribution(one) for name, one in space.settings.items()}
        self._choices = {name: one.choices for name, one in space.settings.items() if one.choices}
        self._study = _opened(folder, facts)
        for trial in self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
            self._give_up(trial)
        # The same seed again would draw the same settings again.
        self._study.sampler = optuna.samplers.TPESampler(seed=seed + len(self._study.trials))
        self._study.pruner = optuna.pruners.NopPruner()
        if prune_after is not None:
            self._study.pruner = optuna.pruners.MedianPruner(prune_after, n_warmup_steps=FIRST_PRUNED_EPOCH)

    def trials(self) -> list[Any]:
        """Trials with a result, in their order: finished, pruned and failed ones."""
        state = self._optuna.trial.TrialState
        ended = self._study.get_trials(deepcopy=False, states=[state.COMPLETE, state.PRUNED, state.FAIL])
        return [trial for trial in ended if trial.state != state.FAIL or ERROR in trial.user_attrs]

    def settings(self, trial: Any) -> dict[str, Any]:
        """The searched settings of a trial."""
        return {
            name: self._choices[name][value] if name in self._choices else value for name, value in trial.params.items()
        }

    def importances(self) -> dict[str, float]:
        """The share of each setting in the variance of finished trials (fANOVA); empty if they are too few or equal."""
        state, importance = self._optuna.trial.TrialState, self._optuna.importance
        values = {trial.value for trial in self._study.get_trials(deepcopy=False, states=[state.COMPLETE])}
        if len(values) < LEAST_TO_COMPARE:
            return {}
        evaluator = importance.FanovaImportanceEvaluator(seed=0)
        return {
            name: float(share)
            for name, share in importance.get_param_importances(self._study, evaluator=evaluator).items()
        }

    def try_next(self, run: Callable[[int, dict[str, Any], Callable[[int, float], bool]], float | None]) -> Any:
        """The next trial after its end. run takes its number, its settings and what to call with each epoch's value.

        That call says whether to end the run at once, and then run returns None.
        """
        trial, state = self._study.ask(self._distributions), self._optuna.trial.TrialState

        def is_hopeless(epoch: int, value: float) -> bool:
            trial.report(value, epoch)
            return trial.should_prune()

        try:
            value = run(trial.number, self.settings(trial), is_hopeless)
        except LostRankError as error:
            trial.set_user_attr(ERROR, str(error))
            return self._study.tell(trial.number, state=state.FAIL)
        except BaseException:
            self._give_up(trial)
            raise
        return self._study.tell(trial.number, value, state=state.PRUNED if value is None else state.COMPLETE)

    def _give_up(self, trial: Any) -> None:
        """Marks an interrupted trial as failed, and has its settings tried again."""
        self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
        self._study.enqueue_trial(trial.params)


def _distribution(one: Setting) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if one.choices:
        return CategoricalDistribution(range(len(one.choices)))  # Optuna stores no lists.
    if isinstance(one.low, int) and isinstance(one.high, int):
        return IntDistribution(one.low, one.high, log=one.log, step=int(one.step or 1))
    return FloatDistribution(one.low or 0.0, one.high or 0.0, log=one.log, step=one.step)


def _opened(folder: Path, facts: Mapping[str, Any]) -> Any:
    """The study in the folder, or a new one of these facts."""
    import optuna

    path = folder / STUDY_FILE
    refuse_link(path, ConfigError, "choose another --output")
    if not path.exists() and folder.exists() and any(one for one in folder.iterdir() if one.name[0] != "."):
        raise ConfigError(f"--output {folder} is not empty and holds no sweep; choose another folder")
    direction = {"max": "maximize", "min": "minimize"}[facts["direction"]]
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{path}", study_name="sweep", direction=direction, load_if_exists=True
        )
    except Exception as error:  # Of sqlalchemy and sqlite, of many kinds.
        raise ConfigError(
            f"{path} cannot be used as the file of a sweep: {in_one_line(error)}; choose another --output"
        ) from error
    known = study.user_attrs
    if differing := next((name for name, value in facts.items() if known.get(name, value) != value), None):
        raise ConfigError(
            f"--output {folder} holds a sweep of other settings: {differing} was {known[differing]} and is "
            f"{facts[differing]}; choose another folder, or give the same"
        )
    for name, value in facts.items():
        if name not in known:
            study.set_user_attr(name, value)
    return study
