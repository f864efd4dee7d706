"""Horovod's Keras interface, name by name, on real ranks; upstream's own tests and examples are the yardstick."""

import ast
import inspect
import json
import os
from pathlib import Path

import numpy as np
import pytest

from launching import WORKERS, run, run_worker

pytestmark = pytest.mark.distributed


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("mpirun", 2), id="mpi-2"),
        pytest.param(("gloo", 3), marks=pytest.mark.release, id="gloo-3"),
        pytest.param(("mpirun", 4), marks=pytest.mark.release, id="mpi-4"),
    ],
)
def ranks(request, tmp_path_factory):
    launcher, num_ranks = request.param
    return run_worker(launcher, num_ranks, "drop_in.py", tmp_path_factory.mktemp(launcher))


def mean(size):
    """Of 1, 2, ... size."""
    return (size + 1) / 2


def test_local_variables_stay_on_their_rank(ranks):
    size = len(ranks)
    for rank, results in enumerate(ranks):
        local = results["local_variables"]
        assert local["scaled"] == pytest.approx([-mean(size), -(rank + 1) / size])
        assert local["unscaled"] == pytest.approx([-mean(size), -(rank + 1)])
        assert local["layers equal"] == [True, False], "the local layer is each rank's own"


def test_all_ranks_skip_an_overflow_of_a_local_variable(ranks):
    for results in ranks:
        assert results["local_overflow"] == [[2.0**14, 0.0, 0.0]] * 2


def test_groups_of_variables(ranks):
    for results in ranks:
        assert results["groups"] == pytest.approx([-mean(len(ranks)), -2 * mean(len(ranks)), 1])


def test_a_copy_from_the_config_reduces_too(ranks):
    for results in ranks:
        assert results["copies"]["same config"] == [True, True]
        assert results["copies"]["after a step"] == pytest.approx([-mean(len(ranks)), 0.0])


def test_adasum(ranks):
    """Maleki et al. 2020, equation 5: (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b of (1, 0) and (1, 1).

    With four ranks both pairs come to the same vector, and that is what it makes of two equal ones.
    """
    for results in ranks:
        if len(ranks) != 3:
            assert results["adasum"] == pytest.approx([-(0.5 * 1 + 0.75 * 1), -(0.75 * 1)])
        else:
            assert "of 3, and local rank" in results["adasum"]


def test_a_process_set_exchanges_among_its_own(ranks):
    if len(ranks) > 2:
        assert [results["process_set"] for results in ranks] == pytest.approx(
            [-2.0, -2.0, -2.0, -4.0][: len(ranks)]
        )
        values, messages = zip(*(results["broadcast_in_a_process_set"] for results in ranks))
        assert values == (2.0, 1.0, 2.0, 3.0)[: len(ranks)]
        assert "ranks 0 and 2 hold different variables at position 0" in messages[0]


def test_all_ranks_skip_an_overflow_while_accumulating(ranks):
    """The sum of two micro-steps that were not skipped, in one reduction."""
    for results in ranks:
        overflow = results["overflow_while_accumulating"]
        assert overflow["scales"] == [2.0**15, 2.0**14]
        assert overflow["reductions"] == [0, 1]
        assert overflow["after"] == pytest.approx([-2 * mean(len(ranks)), 0.0])


def test_tapes_reduce_dense_and_sparse_gradients(ranks):
    size = len(ranks)
    for rank, results in enumerate(ranks):
        tapes = results["tapes"]
        dense, rows, summed = tapes["found"]
        assert dense == pytest.approx([mean(size)] * 2)
        assert [value for row in rows for value in row] == pytest.approx(
            [1 / size] * 2 * size + [0.0, 0.0]
        )
        assert summed == pytest.approx([10 * size * (size - 1) / 2] * 2)
        assert tapes["reductions"] == 4 * 2
        assert tapes["local"] == [[rank + 1, rank + 1]] and tapes["shared"] == 0


def test_a_gradient_that_is_not_finite_reaches_no_weight(ranks):
    for results in ranks:
        expected = {"told": True, "ranks": [len(ranks) - 1], "weights": [-1.0, -1.0]}
        assert results["finite"] == {**expected, "update waits": True}
        assert results["finite_on_gpus"] == {**expected, "update waits": False}


def test_constants_are_exchanged_in_every_step(ranks):
    """TensorFlow would do it only once, while it optimizes the graph, and each rank as often as it traces the step."""
    size = len(ranks)
    constants = [results["exchanges_of_constants"] for results in ranks]
    sizes = range(1, size + 1)
    for results in constants:
        assert (results["exchanges"], results["constant"]) == (5, [])
        assert results["rows"] == pytest.approx([1.0, *([1 / size] * size)])
        assert results["batch"] == [float(number) for number in sizes for _ in range(number)]
    joint_mean = sum(number**2 for number in sizes) / sum(sizes)
    assert np.mean([results["mean"] for results in constants]) == pytest.approx(joint_mean)


def test_no_rank_stops_alone(ranks):
    """Wished by the last rank after its third batch, and at the end of the second epoch of 16 batches."""
    assert [results["stopping_and_drifting"]["batches"] for results in ranks] == [[4, 32]] * len(
        ranks
    )
    tables = [results["stopping_and_drifting"]["batches of a table"] for results in ranks]
    assert tables == [4] * len(ranks), "the wish travels without dense gradients too"


def test_callbacks_act_on_a_second_model_as_on_the_first(ranks):
    """Broadcast, stop and comparison. An optimizer that one rank alone has made, and never steps, changes nothing."""
    expected = {"batches": 4, "are equal": True}
    assert [results["one_list_of_callbacks_for_two_models"] for results in ranks] == [
        [expected] * 2
    ] * len(ranks)


def test_gradients_that_a_rank_accumulates_are_no_drift(ranks):
    """They differ between two steps, and a callback that compares weights after each batch lets them."""
    first, second = (results["stopping_and_drifting"]["accumulated"] for results in ranks[:2])
    assert first != second


def test_a_checkpoint_gets_the_mean_of_accumulated_gradients(ranks):
    own = [results["stopping_and_drifting"]["accumulated"] for results in ranks]
    for results in ranks:
        averaged = results["stopping_and_drifting"]["averaged"]
        assert np.allclose(averaged, np.mean(own, axis=0), atol=1e-6)


def test_weights_that_drift_are_named(ranks):
    last = len(ranks) - 1
    for results in ranks:
        drift = results["stopping_and_drifting"]
        assert "first in" in drift["moving"] and "batch_normalization" in drift["moving"]
        assert drift["drift"].startswith(f"RankError: weights differ after step 7: rank {last} on ")
        assert "hidden/kernel by up to 1" in drift["drift"] and "e-06" in drift["drift"]
        assert drift["drift seen in training"].startswith("RankError: weights differ at batch 0")


def test_saved_models_reduce_again(ranks):
    assert len({results["saving"]["weights equal"] for results in ranks}) == 1
    for results in ranks:
        assert results["saving"]["reduces"] == 1
        assert results["saving"]["own optimizer"] == "Mine"
        assert results["saving"]["iterations"] == 3
        assert results["saving"]["in parts"] == 2
        assert (
            "filepath=None; give a path that ends in .keras" in results["saving"]["without a path"]
        )
        assert "which Keras 3 does not have" in results["saving"]["legacy"]


REFUSED = {
    "no variables": "ValueError: there are no variables to broadcast, as in a model that is not built yet, and each",
    "global variables": "RuntimeError: broadcast_global_variables finds no global variables in TensorFlow 2",
    "groups": "groups=-1 is neither a number above 0 nor a list of lists of variables",
    "op": "cannot reduce gradients; choose hvd.Average, hvd.Sum or hvd.Adasum",
    "predivide": "gradient_predivide_factor needs op=Average",
    "complex": "ValueError: Horovod cannot reduce complex gradients",
    "twice": "is a DistributedOptimizer already; wrap only the outermost optimizer",
    "not keras": "TypeError: object is not a keras.optimizers.Optimizer; pass an optimizer of Keras 3",
    "local layer": "has no weights yet; build the model before its optimizer",
    "passes": "needs an optimizer that is not built yet and has no gradient_accumulation_steps of its own",
    "local variables": "check_finite needs gradients that all ranks share",
    "local and clipped": "global_clipnorm needs gradients that all ranks share; leave it out with local variables",
    "elastic errors": "KerasState cannot keep the errors of a compression or the anchors of DiLoCo",
    "elastic anchors": "KerasState cannot keep the errors of a compression or the anchors of DiLoCo",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_at_once(ranks, what):
    assert all(REFUSED[what] in results["refusals"][what] for results in ranks)


def test_a_script_written_for_horovod_runs_with_one_line_changed(ranks):
    results = [rank["a_script_for_horovod"] for rank in ranks]
    assert all(other == results[0] for other in results), "the same scores and weights on all ranks"
    assert results[0]["resumed from"] == 2
    assert results[0]["scores"][0][1] > 0.7
    assert results[0]["rate"] == pytest.approx(0.05 * len(ranks) * 0.1)


# Upstream's modules, read as text: their import would bring a second Horovod into the tests.
UPSTREAM = [
    "tensorflow/keras/__init__.py",
    "keras/__init__.py",
    "tensorflow/keras/callbacks.py",
    "keras/callbacks.py",
]
UPSTREAM += ["tensorflow/keras/elastic.py", "tensorflow/sync_batch_norm.py"]
# What horovod.tensorflow imports for itself.
INNER = {
    "LocalGradientAggregationHelper",
    "check_num_rank_power_of_2",
    "handle_average_backwards_compatibility",
}
INNER |= {"refs_to_vars", "vars_to_refs"}
# Of horovod.tensorflow, whose other names are for TensorFlow 1 and for optimizers that Keras 3 does not have.
OF_TENSORFLOW = {
    "tensorflow/__init__.py": {"DistributedGradientTape", "PartialDistributedGradientTape"},
    "tensorflow/functions.py": {"broadcast_variables"},
    "tensorflow/elastic.py": {"TensorFlowKerasState", "run"},
}


def public_signatures():
    """(name, arguments) of upstream's public functions and classes."""
    import importlib.util

    folder = Path(importlib.util.find_spec("horovod").origin).parent
    for name in [*UPSTREAM, *OF_TENSORFLOW]:
        for node in ast.walk(ast.parse((folder / name).read_text())):
            init = node
            if isinstance(node, ast.ClassDef):
                inits = [item for item in node.body if getattr(item, "name", "") == "__init__"]
                init = inits[0] if inits else None
            if (
                not isinstance(node, ast.FunctionDef | ast.ClassDef)
                or node.name.startswith("_")
                or init is None
            ):
                continue
            is_method = (
                isinstance(node, ast.FunctionDef)
                and node.args.args
                and node.args.args[0].arg in ("self", "cls")
            )
            if is_method or node.name not in OF_TENSORFLOW.get(name, {node.name}):
                continue
            if node.name not in ("wrap_optimizer",):
                yield (
                    name,
                    node.name,
                    [argument.arg for argument in init.args.args if argument.arg != "self"],
                )


@pytest.mark.parametrize(("module", "name", "arguments"), list(public_signatures()))
def test_every_public_name_and_argument_of_upstream_exists(module, name, arguments):
    import hvtrain.keras as hvd

    namespace = hvd
    if "elastic" in module:
        namespace = hvd.elastic
    elif "callbacks" in module:
        namespace = hvd.callbacks
    known = inspect.signature(getattr(namespace, name)).parameters
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in known.values())
    assert takes_all or set(arguments) <= set(known), f"{set(arguments) - set(known)} of {name}"


def test_every_imported_name_of_upstream_exists():
    import importlib.util

    import hvtrain.keras as hvd

    folder = Path(importlib.util.find_spec("horovod").origin).parent
    for name in (*UPSTREAM[:2], "tensorflow/__init__.py"):
        for node in ast.parse((folder / name).read_text()).body:
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("horovod.")
                and "common" not in node.module
            ):
                public = {
                    alias.name for alias in node.names if not alias.name.startswith("_")
                } - INNER
                assert [item for item in sorted(public) if not hasattr(hvd, item)] == [], (
                    f"{name} has them"
                )


@pytest.mark.nightly
def test_the_library_needs_no_hydra():
    import subprocess
    import sys

    code = "import sys, hvtrain.keras; sys.exit(bool({'hydra', 'omegaconf'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("launcher", "variables", "cycle", "gives_way"),
    [
        pytest.param("mpirun", {}, "0.1", "1", marks=pytest.mark.nightly),
        pytest.param(
            *("mpirun", {"HOROVOD_CYCLE_TIME": "3", "OMPI_MCA_mpi_yield_when_idle": "0"}, "3", "0"),
            marks=pytest.mark.release,
        ),
        pytest.param("gloo", {}, None, None, marks=pytest.mark.nightly),
    ],
)
def test_pace_and_memory(launcher, variables, cycle, gives_way, tmp_path):
    """Ranks of one host meet often under MPI and give way while they wait; each stays on its share of the cores."""
    code, output = run(
        launcher,
        2,
        "python",
        str(WORKERS / "pace.py"),
        str(tmp_path / "found"),
        cwd=tmp_path,
        **variables,
    )
    assert code == 0, output
    results = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in (0, 1)]
    everything = sorted(os.sched_getaffinity(1))
    assert len(everything) % 2 or sorted(results[0][2] + results[1][2]) == everything
    for chosen, pages, _, give_way in results:
        assert (chosen["HOROVOD_CYCLE_TIME"], chosen["OMPI_MCA_mpi_yield_when_idle"]) == (
            cycle,
            gives_way,
        )
        assert (give_way > 0) is (launcher == "mpirun"), (
            "Horovod's threads, where they wait inside MPI"
        )
        assert chosen["HOROVOD_DISABLE_GROUP_FUSION"] == "1"
        assert pages < 1000, "a large reduction takes no new ones"
