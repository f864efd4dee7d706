"""`python -m hvtrain sweep`: the settings with which a run learns best, by one run of N ranks for each trial."""

import sys
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hvtrain.config.compose import compose, override
from hvtrain.config.schema import RunConfig, from_dict
from hvtrain.errors import BusyError, ConfigError
from hvtrain.search.search_space import MAX, MIN, SearchSpace, goal_of, read_space
from hvtrain.search.study import Study
from hvtrain.search.trials import Trials
from hvtrain.storage.remote import local_folder
from hvtrain.system.command import RUN_SETTINGS, Parser, add_number, at_least
from hvtrain.system.run_lock import RunLock
from hvtrain.system.secrets import command_line, without_secrets

EPILOG = f"""\
{RUN_SETTINGS}
SPACE is one of conf/sweep, of the folder sweep of --config-dir, or a YAML file:
  optimizer.learning_rate: {{low: 1.0e-4, high: 1.0e-1, log: true}}
  model.dropout: {{low: 0.0, high: 0.5, step: 0.1}}
  optimizer: {{choices: [adam, sgd]}}

examples:
  python -m hvtrain sweep sweep=optimizer trials=20 -np 2 dataset=digits dataset.num_validation=300
  python -m hvtrain sweep sweep=my.yaml trials=50 -np 8 -H s1:4,s2:4 --metric val_loss model=resnet50 ...

The same command again goes on with a sweep that was ended; docs/sweep.md has more.
"""


def main() -> int:
    """Checks everything, then runs one trial after the other; 1 if none of them finished."""
    # Composing may change sys.argv, and the record of the sweep has the command as it was given.
    arguments = sys.argv[1:]
    options = _parser().parse_with_overrides(arguments)
    request = parse_request(options.overrides)
    # Not part of the environment, since no run needs it.
    if not find_spec("optuna"):
        raise ConfigError(
            "this command needs optuna, which is not installed; install scripts/lock/sweep.txt, or optuna"
        )

    space = read_space(request.space, request.overrides)
    configs = _compose_examples(space, request.overrides)
    # Hydra has printed a run, and no sweep was asked for.
    if not configs:
        return 0

    goal = goal_of(configs[0], options.metric, options.direction)
    # Trials can be compared only if these are the same, so the study keeps them.
    facts = {
        "metric": goal.metric,
        "direction": goal.direction,
        "num_ranks": options.np,
        "words": without_secrets(request.overrides),
        "space": space.settings,
    }
    results = {
        "command": command_line("sweep", arguments),
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        **facts,
    }
    launcher = ("-np", str(options.np), *options.hosts)
    # The same name for the same sweep, so that the same command goes on with it.
    folder = local_folder(options.output or f"sweeps/{space.path.stem}-{configs[0].run.name}", "--output")
    prune_after = None if options.no_pruning else options.prune_after

    # Until the last trial has ended: two sweeps in a folder would take each other's trials for interrupted ones.
    with RunLock() as lock:
        _take(lock, folder)
        study = Study(folder, space, facts, options.seed, prune_after)
        overrides = tuple(request.overrides)
        return Trials(study, goal, launcher, overrides, folder, request.num_trials, results).run()


class Request(NamedTuple):
    """The arguments without dashes: sweep=SPACE, trials=N, and settings of the runs."""

    space: str
    num_trials: int
    overrides: list[str]


def parse_request(arguments: Sequence[str]) -> Request:
    """Separates sweep=SPACE and trials=N from the settings.

    Raises ConfigError if one of them is wrong.
    """
    space = ""
    # As text, since the line may give another one.
    trials = "20"

    # What is left goes to Hydra, which knows the settings.
    overrides = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "sweep":
            space = value
        elif name == "trials":
            trials = value
        elif name == "run.dir":
            raise ConfigError(
                f"{argument} came, and each trial has a run folder of its own; choose --output DIR instead"
            )
        else:
            overrides.append(argument)

    if not space:
        raise ConfigError("sweep=SPACE is missing; name a search space, such as sweep=optimizer")
    # isdecimal refuses signs and fractions, which int or float would take.
    if not trials.isdecimal() or int(trials) < 1:
        raise ConfigError(f"trials={trials} is not a whole number of at least 1")

    return Request(space, int(trials), overrides)


def _compose_examples(space: SearchSpace, overrides: list[str]) -> list[RunConfig]:
    """Composes runs with both ends and every choice of each setting, so that no trial is refused hours later.

    Empty if the overrides only ask Hydra to print one.
    """
    for argument in overrides:
        if argument.partition("=")[0] in space.settings:
            raise ConfigError(f"{argument} came, and {space.path} searches that setting; leave it out of one of them")

    configs = []
    for example in space.examples():
        # As a trial will give them on its command line.
        searched = [override(name, value) for name, value in example.items()]
        trees = compose([*overrides, *searched])
        if not trees:
            return []
        configs.append(from_dict(trees[0]))

    return configs


def _take(lock: RunLock, folder: Path) -> None:
    """Keeps the folder to one sweep at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A sweep takes hours, so there is nothing to wait for.
        lock.take(folder, wait_seconds=0.0)
    except BusyError as error:
        raise BusyError(f"--output {folder} is in use by another sweep; wait for its end, or choose another") from error
    except OSError as error:
        raise ConfigError(f"--output {folder} cannot be written: {error.strerror}; choose another folder") from error


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain sweep",
        usage="%(prog)s sweep=SPACE [trials=N] [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Trains with one choice of settings after the other, each on N ranks, and finds good ones by optuna (TPE). Ends trials
that lag behind the median of the others. Writes sweep.csv, sweep.json and sweep.png, and prints the line that trains
with the best settings again. trials: results in all, those that are there included; default: 20.""",
        epilog=EPILOG,
    )
    option = parser.add_argument
    add_number(parser, "-np", at_least(1), "ranks of a trial", 2)
    parser.add_hosts()
    option(
        "--metric",
        metavar="NAME",
        help="a column of history.csv; default: checkpoint.best, that of the task",
    )
    option(
        "--direction",
        choices=(MAX, MIN),
        help="which of its values is best; default: by its name",
    )
    about = "finished trials before others are pruned, from epoch 2 on"
    add_number(parser, "--prune-after", at_least(1), about, 5)
    option("--no-pruning", action="store_true", help="each trial trains to its end")
    add_number(parser, "--seed", at_least(0), "of the choice of settings", 0)
    option("--output", metavar="DIR", help="default: sweeps/SPACE-RUN, with the name of the run")

    return parser
