"""Runs on each rank: the checks of hvtrain verify, each with what it checks broken. argv[1:]: a run's words.

Exits as hvtrain verify does: with 1 when a check failed.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import fast_keras  # noqa: F401
from leaves import ForgetsToReduce

import hvtrain.keras as hvd
from hvtrain.checkpoint import model_state
from hvtrain.checks import joint_batch, rank_checks
from hvtrain.checks.table import CheckError
from hvtrain.checks.verify import run_checks
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.core.topology import Topology
from hvtrain.data.sources.arrays import ArraySource
from hvtrain.keras.reduction import Reducer
from hvtrain.strategies.horovod import HorovodStrategy

strategy = HorovodStrategy()
strategy.start()
tree = compose()
checks = rank_checks.library_checks(strategy, from_dict(tree))


def broken(name, target, **instead):
    """The check of that name while parts of the target are replaced."""

    def run():
        with mock.patch.multiple(target, **instead):
            return checks[name]()

    return {name: run}


def plain_metrics(model, dataset):
    """What goes wrong elsewhere: the mean over ranks of each rank's mean."""
    own = model.evaluate(dataset, verbose=0, return_dict=True)
    return {key: float(value) for key, value in own.items()}


def software(config):
    return {"version of keras": f"3.{hvd.rank()}"}


def same_for_all(self, request):
    return training(self, replace(request, topology=Topology(0, request.topology.size)))


def restores_nothing(newest, model):
    pass


training = ArraySource.training


def joint_case(wrap, name="sgd"):
    compare = joint_batch.compare
    with mock.patch.object(joint_batch, "compare", lambda case: compare(case, wrap=wrap)):
        return checks[name]()


def without_exchange(optimizer):
    optimizer = hvd.DistributedOptimizer(optimizer)
    reducer = optimizer._hvtrain.reducer
    reducer._reduce_group = lambda tensors, name: list(tensors)
    return optimizer


own_run = from_dict({**tree, "dataset": {**tree["dataset"], "same_data": "by_mistake"}})
forgetful = ForgetsToReduce()
forgetful.comm.topology = strategy.topology
own_checks = rank_checks.own_run_checks(own_run, forgetful)
other_data = rank_checks.own_run_checks(from_dict(tree), forgetful)


def weights_after_a_step():
    with contextlib.suppress(CheckError):
        other_data["step of your model"]()
    return other_data["weights"]()


passed = run_checks(
    {
        **broken("versions", "hvtrain.training.consistency", software=software),
        **broken("devices", strategy, devices=["s1 GPU 0", "s1 GPU 0"]),
        **broken(
            "broadcast",
            "hvtrain.checks.rank_checks.hvd",
            broadcast_variables=lambda variables, root: None,
        ),
        "not reduced": lambda: joint_case(lambda optimizer: optimizer),
        "own step": lambda: joint_case(lambda optimizer: optimizer, "a step of its own"),
        "not shared": lambda: joint_case(without_exchange),
        "summed": lambda: joint_case(
            lambda optimizer: hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
        ),
        **broken(
            "ignored labels", "hvtrain.checks.joint_batch.hvd", DistributedLoss=lambda loss: loss
        ),
        **broken(
            "different models", Reducer, __call__=lambda self, gradients, variables: gradients
        ),
        **broken("shards", ArraySource, training=same_for_all),
        **broken("metrics", strategy, evaluate=plain_metrics),
        **broken("checkpoint", model_state, restore=restores_nothing),
        "data: leaves": own_checks["data: leaves"],
        "step of your model": own_checks["step of your model"],
        "weights": weights_after_a_step,
    },
    strategy,
)
strategy.stop()
raise SystemExit(0 if passed else 1)
