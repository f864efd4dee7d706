"""Runs on each rank: several runs of the runner, one after the other, in one start of the ranks.

argv[1]: a JSON file with {name: [override, ...]}; each run's folder is that name beside it, without what follows a
slash. argv[2]: where rank 0 writes what each rank saw: the record, or the error.
"""

import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import keras
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import hvtrain.keras as hvd
from hvtrain import runner
from hvtrain.composition import CONFIGS, schema
from hvtrain.config import from_dict
from hvtrain.errors import UserError
from hvtrain.strategies.horovod import HorovodStrategy

OWN = Path(__file__).parents[1] / "own"
sys.path.insert(0, str(OWN))
FOLDER = Path(sys.argv[1]).parent


class Stays(HorovodStrategy):
    """Leaves the other ranks only when all runs are done."""

    def stop(self):
        pass


def one_run(name, words):
    words = [*words, "model=tiny", "dataset=leaves", f"run.dir={FOLDER / name.partition('/')[0]}"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        tree = compose("config", overrides=[f"hydra.searchpath=[file://{OWN / 'conf'}]", *words])
    config = from_dict(OmegaConf.to_container(tree, resolve=True))
    keras.utils.clear_session()
    try:
        return {"record": asdict(runner.run(config, Stays()))}
    except UserError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    ConfigStore.instance().store("hvtrain_schema", schema())
    hvd.init()
    found = {}
    for name, words in json.loads(Path(sys.argv[1]).read_text()).items():
        began = time.monotonic()
        found[name] = one_run(name, words)
        if hvd.rank() == 0:
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    everyone = hvd.allgather_object(found)
    if hvd.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(everyone, default=str))
    hvd.shutdown()


main()
