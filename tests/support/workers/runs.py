"""Runs on each rank: several runs of the runner, one after the other, in one start of the ranks.

argv[1]: a JSON file with {name: [override, ...]}; each run's folder is that name beside it, without what follows a
slash, unless it has a run.dir of its own. "{rank}" in an override is the rank.
argv[2]: where rank 0 writes what each rank saw: the record, the error, or the exit code after a signal.
A name that begins with "joint" is trained against one process on the joint batches instead. One that begins with "read"
is not trained: what each rank reads is recorded.
"""

import contextlib
import hashlib
import json
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import fast_keras  # noqa: F401
import keras
import numpy as np
import tensorflow as tf
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

import hvtrain.keras as hvd
from hvtrain import runner
from hvtrain.checks.joint_batch import largest_difference
from hvtrain.config.choices import CONFIGS
from hvtrain.config.compose import resolve, schema
from hvtrain.config.instantiate import build
from hvtrain.config.make_plan import make_plan
from hvtrain.config.schema import from_dict
from hvtrain.core.topology import Topology
from hvtrain.errors import Stopped, UserError, in_one_line, location_of
from hvtrain.keras.process import keep_mpi_initialized
from hvtrain.models.rates import factors_of, multiply_rates
from hvtrain.strategies.base import Strategy
from hvtrain.training.prepared_step import class_weights, prepare_step, weights_of
from hvtrain.training.run import RunState, training_batches, with_rank_weights
from hvtrain.training.setup import (
    build_model,
    build_optimizer,
    open_data,
    open_task,
    open_task_and_layers,
    plan_run,
)

OWN = Path(__file__).parents[1] / "own"
sys.path.insert(0, str(OWN))
FOLDER = Path(sys.argv[1]).parent


def staying(config):
    """The run's strategy, which leaves the other ranks only when all runs are done."""
    strategy = build(config, "strategy", Strategy)
    strategy.stop = lambda: None
    return strategy


def composed(name, settings):
    # Each run would begin a watch of its own, which only the end of the ranks would end.
    settings = [
        "model=tiny",
        "dataset=leaves",
        "watchdog.abort_seconds=0",
        *(setting.replace("{rank}", str(hvd.rank())) for setting in settings),
    ]
    if not any(setting.startswith("run.dir=") for setting in settings):
        settings.append(f"run.dir={FOLDER / name.partition('/')[0]}")
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        tree = compose("config", overrides=[f"hydra.searchpath=[file://{OWN / 'conf'}]", *settings])
    return from_dict(resolve(tree))


def one_run(config):
    try:
        return {
            "record": asdict(
                runner.run_to_end(
                    config, staying(config), runner.whole_run, RunState(time.monotonic())
                )
            )
        }
    except Stopped as stopped:
        return {"stopped": stopped.code}
    except UserError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{in_one_line(error)} ({location_of(error)})"}


def images_read(config):
    """Digests of the images that this rank reads in each step of two epochs, of a plan for two ranks."""
    source = open_data(config, hvd.rank())
    open_task_and_layers(config, source, is_resized=hvd.size() != 2)
    plan = make_plan(
        config.train,
        0.1,
        source.shard_sizes("train", 2),
        source.name,
        [config.train.batch_size] * 2,
    )
    stream = training_batches(
        source, plan.on(hvd.size()), Topology(hvd.rank(), hvd.size()), config.seed, 0
    )
    steps = stream.take(2 * plan.steps_per_epoch).as_numpy_iterator()
    return [[hashlib.sha256(image).hexdigest() for image in images] for images, _ in steps]


def against_the_joint_batches(config):
    """Largest differences of the weights from one process's: of these ranks, and with the corrections off.

    One process trains with Keras alone on the joined batches, and with Keras's own class weights. The metrics are pairs
    of ours and its: of training, and of the test data in one batch.
    """
    strategy = staying(config)
    strategy.start()
    source = open_data(config, hvd.rank())
    plan, topology = plan_run(config, source, strategy)
    task = open_task_and_layers(config, source, plan.is_resized)
    stream = training_batches(source, plan, topology, 1, 0)
    everyone = strategy.comm.gather(list(stream.take(plan.num_steps).as_numpy_iterator()))
    results = {
        "sizes": [[len(tf.nest.flatten(batch)[0]) for batch in batches] for batches in everyone]
    }
    # Metrics change no weight, and some tasks have many, of which each is traced.
    plain_task = open_task(replace(config, task={**config.task, "metrics": {}}), source)
    first = None
    for name in ("exact", "uncorrected"):
        exact = name == "exact"
        with (
            contextlib.nullcontext()
            if exact
            else mock.patch.object(strategy, "distribute_loss", lambda loss: loss)
        ):
            model = build_model(config, source, task if exact else plain_task, plan, strategy)
        hvd.broadcast_model(model)
        if first is None:
            first = model.get_weights()
        model.set_weights(first)
        batches = stream if plan.is_even else with_rank_weights(stream, plan, hvd.rank(), 0)
        if not exact and not plan.is_even:
            batches = batches.map(lambda batch, weight: (batch, tf.ones_like(weight)))
        step = tf.function(strategy.train_step(model) or model.train_step, reduce_retracing=True)
        for batch in batches.take(plan.num_steps):
            step(batch)
        if exact:
            ours = strategy.metrics_over_ranks(model)
            model.reset_metrics()
            tested = strategy.evaluate(model, source.evaluation("test", topology, 4))
            facts = {**source.facts(), **task.facts(source), "input_spec": source.element_spec[0]}
            joint = build(config, "model", keras.Model, facts, source.name)
            joint.set_weights(first)
            weighted, soft = (
                len(source.element_spec) > 2,
                bool(source.augmentation and source.augmentation.mixes),
            )
            task.compile(joint, build_optimizer(config, plan), weighted=weighted, soft_targets=soft)
            # By position, since its layers have other names.
            factors = factors_of(model, config.train.rates)
            multiply_rates(joint.optimizer, joint.trainable_variables, factors)
            prepare_step(joint, source, harden=task.harden)
            by_class, train_one = (
                class_weights(config, source, task),
                tf.function(joint.train_step, reduce_retracing=True),
            )
            for parts in zip(*everyone):
                whole = tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)
                if (
                    by_class
                ):  # Keras turns them into weights of examples too, and weights no pixels.
                    whole = (*whole, weights_of(tf.constant(whole[1]), by_class).numpy())
                metrics = train_one(whole)
            results["metrics"] = {key: [ours[key], float(value)] for key, value in metrics.items()}
            whole = next(iter(source.evaluation("test", Topology(), source.num_examples("test"))))
            joint_metrics = (
                joint.test_on_batch(*whole, return_dict=True)
                if joint.reset_metrics() is None
                else {}
            )
            results["tested"] = {
                key: [tested[key], float(value)] for key, value in joint_metrics.items()
            }
        results[name] = largest_difference(model.get_weights(), joint.get_weights())
    return results


def main():
    ConfigStore.instance().store("hvtrain_schema", schema())
    runs = json.loads(Path(sys.argv[1]).read_text())
    if any("comm.tune=true" in settings for settings in runs.values()):
        keep_mpi_initialized()
    hvd.init()
    results = {}
    for name, settings in runs.items():
        began = time.monotonic()
        config = composed(name, settings)
        kinds = {"joint": against_the_joint_batches, "read": images_read}
        results[name] = kinds.get(name.split()[0], one_run)(config)
        if hvd.rank() == 0:
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    everyone = hvd.allgather_object(results)
    if hvd.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(everyone, default=str))
    hvd.shutdown()


main()
