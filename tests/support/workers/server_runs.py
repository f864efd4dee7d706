"""Runs with parameter servers, one after the other, in one start of the processes. Only rank 0 makes them.

argv[1]: a JSON file with {name: [override, ...]}; each run's folder is that name beside it, without what follows a
slash. With strategy=single one process, rank 0, trains on the joint batches of two ranks.
argv[2]: where rank 0 writes each run's record or error.
"""

import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import fast_keras  # noqa: F401
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from hvtrain import runner
from hvtrain.config.choices import CONFIGS
from hvtrain.config.compose import resolve, schema
from hvtrain.config.instantiate import build
from hvtrain.config.schema import from_dict
from hvtrain.errors import UserError
from hvtrain.strategies import base
from hvtrain.strategies.base import Strategy
from hvtrain.system import console
from hvtrain.training.run import RunState

sys.path.insert(0, str(Path(__file__).parents[1] / "own"))
FOLDER = Path(sys.argv[1]).parent


def composed(name, settings):
    folder = name.partition("/")[0]
    own = [
        "~model",
        "~dataset",
        "+model={_target_: kinds.model, kind: words}",
        "+dataset={_target_: kinds.data, kind: words}",
    ]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        return from_dict(
            resolve(compose("config", overrides=[*own, f"run.dir={FOLDER / folder}", *settings]))
        )


def one_run(strategy, config):
    strategy.stop = lambda: None
    try:
        return {
            "record": asdict(
                runner.run_to_end(config, strategy, runner.whole_run, RunState(time.monotonic()))
            )
        }
    except UserError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except Exception:
        return {"error": traceback.format_exc()}


def main():
    base.refuse_several_processes = lambda *names: None  # A single process, beside the servers.
    ConfigStore.instance().store("hvtrain_schema", schema())
    runs = {
        name: composed(name, settings)
        for name, settings in json.loads(Path(sys.argv[1]).read_text()).items()
    }
    first = next(iter(runs.values()))
    if console.launched_rank():
        build(first, "strategy", Strategy).start()
        raise AssertionError("a server came back")
    results = {}
    last = None
    for name, config in runs.items():
        strategy = build(config, "strategy", Strategy)
        if type(strategy) is Strategy:
            strategy.num_replicas = 2
        else:
            last = strategy
        results[name] = {
            **one_run(strategy, config),
            "parts": getattr(strategy, "part_sizes", None),
        }
        Path(sys.argv[2]).write_text(json.dumps(results, default=str))
    last.comm.watchdog.stop()


main()
