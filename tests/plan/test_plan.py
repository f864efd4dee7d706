"""`python -m hvtrain plan`: what it prints and writes, and that it starts nothing."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvtrain.config.compose import compose, composed
from hvtrain.config.instantiate import build
from hvtrain.config.schema import from_dict
from hvtrain.errors import ConfigError, DataError
from hvtrain.plan import command, machine
from hvtrain.plan.algorithms import (
    LINK_SHARE,
    NETWORK_SECONDS,
    PCIE_SECONDS,
    Link,
    Machine,
    flat_ring_seconds,
)
from hvtrain.plan.command import main, measured_step_seconds
from hvtrain.plan.forecast import forecast, key_steps
from hvtrain.plan.report import launch_line
from hvtrain.strategies.base import Strategy
from hvtrain.training.setup import open_source, open_task_and_layers
from in_process import run_command

RESNET20 = [
    "model=resnet20",
    "dataset=synthetic",
    "dataset.image_shape=[32,32,3]",
    "dataset.num_classes=10",
]
# It must neither start Horovod nor train.
ALONE = """
import sys
import keras
from hvtrain.plan.command import main
def fit(*words, **more): raise AssertionError("it trains")
keras.Model.fit = keras.Model.train_on_batch = fit
code = main()
sys.exit(code or (3 if "horovod" in sys.modules else 0))
"""


def python(*arguments, cwd):
    line = [sys.executable, *arguments]
    result = subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    arguments = [
        "-np",
        "256",
        "--ranks-per-host",
        "8",
        "--step-seconds",
        "0.05",
        "--link-gbits",
        "10",
        "--output",
        "out",
    ]
    arguments += [
        *RESNET20,
        "dataset.num_train=1000000",
        "train.batch_size=64",
        "train.epochs=9",
        "schedule=step",
    ]
    arguments += ["schedule.at_epochs=[3,6]", "optimizer=momentum"]
    code, output, errors = python("-c", ALONE, *arguments, cwd=folder)
    assert code == 0, output + errors
    return output, json.loads((folder / "out" / "plan.json").read_text()), folder / "out"


def test_arithmetic_of_the_run(planned):
    output, content, _ = planned
    steps_per_epoch = 1_000_000 // 256 // 64
    assert content["global_batch"] == 16384 and content["num_steps"] == 9 * steps_per_epoch
    assert "256 x 64 = 16,384 (ranks x batch)" in output
    assert f"{9 * steps_per_epoch:,} ({steps_per_epoch} per epoch, 9 epochs; " in output
    assert "0.01 x 256 = 2.56 (base x linear scale)" in output
    rates = dict(content["learning_rate"])
    assert rates[0] == 0.01 and rates[steps_per_epoch] == pytest.approx(2.56)
    assert rates[3 * steps_per_epoch] == pytest.approx(0.256)
    assert rates[9 * steps_per_epoch - 1] == pytest.approx(0.0256)


def test_bytes(planned):
    output, content, _ = planned
    memory = content["memory_bytes"]
    assert memory["gradients"] == 4 * 272_474, "the trainable parameters"
    assert memory["weights"] == 4 * (272_474 + 1568)
    assert memory["gradients"] <= memory["optimizer slots"] < memory["gradients"] + 100, (
        "momentum, and two counters"
    )
    assert content["checkpoint_bytes"] == memory["weights"] + memory["optimizer slots"]
    assert memory["activations"] > 64 * 4 * 32 * 32 * 16 * 7
    assert re.search(r"activations \d\S* [kMG]B \(an estimate\)", output)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "setting", "line"),
    [
        (
            {},
            1,
            "dataset.api_key=hunter2",
            "horovodrun -np 1 python -m hvtrain 'dataset.api_key=***'",
        ),
        ({}, 2, "model=cnn", "horovodrun -np 2 python -m hvtrain model=cnn"),
        ({}, 8, "model=cnn", "python -m hvtrain launch -np 8 --hostfile hosts.txt -- model=cnn"),
        ({"num_replicas": 4}, 4, "model=cnn", "python -m hvtrain launch -np 4 -- model=cnn"),
    ],
)
def test_the_launch_line_fits_the_hosts_and_has_no_secret(strategy, num_ranks, setting, line):
    run = SimpleNamespace(
        plan=SimpleNamespace(size=num_ranks), config=SimpleNamespace(strategy=strategy)
    )
    options = SimpleNamespace(overrides=[setting], ranks_per_host=4)
    assert launch_line(run, options) == line


def test_launch_line_is_one_that_launch_takes(planned):
    output, content, folder = planned
    assert "hosts.txt: 32 lines like `s1 slots=8`" in output
    launch = content["launch"].split()
    assert launch[:5] == ["python", "-m", "hvtrain", "launch", "-np"]
    (folder / "hosts.txt").write_text("\n".join(f"s{number} slots=8" for number in range(32)))
    code, output, errors = run_command(
        *launch[2:6], "--dry-run", *launch[6:8], "--", *RESNET20, cwd=folder
    )
    assert code == 0 and "-np 256" in output, output + errors


def test_step_on_1_to_n_ranks(planned):
    output, content, _ = planned
    costs = content["costs"]
    assert [cost["num_ranks"] for cost in costs] == [2**power for power in range(9)]
    assert costs[0]["step_seconds"] == pytest.approx(0.05) and costs[0][
        "efficiency"
    ] == pytest.approx(1)
    efficiencies = [cost["efficiency"] for cost in costs]
    assert efficiencies == sorted(efficiencies, reverse=True) and efficiencies[-1] > 0.5
    # On 16 ranks, two hosts, all gradients go as one ring after the last is ready.
    inside, between = (
        Link(PCIE_SECONDS, 15.75e9 * LINK_SHARE),
        Link(NETWORK_SECONDS, 10e9 / 8 * LINK_SHARE),
    )
    hosts = Machine(inside, between, 8)
    assert costs[4]["communication_seconds"] == pytest.approx(
        flat_ring_seconds(4 * 272_474, 16, hosts)
    )
    row = next(line for line in output.splitlines() if line.split()[:1] == ["256"]).split()
    assert (
        row[1] == f"{1000 * costs[-1]['step_seconds']:,.1f}" and row[-1] == costs[-1]["algorithm"]
    )


def measured(path, num_ranks, start, bandwidth):
    seconds = {
        str(size): [start + 2 * (num_ranks - 1) / num_ranks * size / bandwidth] * 3
        for size in (4, 4096, 1 << 20, 1 << 26)
    }
    path.write_text(
        json.dumps(
            {
                "num_ranks": num_ranks,
                "seconds": {
                    "hvtrain": {**seconds, "small": [1], "whole": [1], "gather-4194304": [0.126]}
                },
            }
        )
    )


def test_calibrated_and_without_the_data(tmp_path, monkeypatch, capsys):
    """One file for the link inside, another for that between hosts; data elsewhere; unlike batches; advice."""
    measured(tmp_path / "inside.json", 2, 2e-4, 5e9)
    measured(tmp_path / "between.json", 4, 3e-4, 1e8)
    arguments = [
        "-np",
        "4",
        "--ranks-per-host",
        "2",
        "--step-seconds",
        "0.1",
        "--straggler",
        "0",
        "--examples",
        "5000",
    ]
    arguments += [
        "--latency-us",
        "0",
        "--inside-latency-us",
        "0",
        "--output",
        "out",
        "--algorithm",
        "ring",
    ]
    arguments += ["--classes", "10", "--advise", "--noise-scale", "136"]
    arguments += [
        "--calibrate",
        "inside.json",
        "--calibrate",
        "between.json",
        "model=mlp",
        "dataset=image_folder",
    ]
    arguments += [
        "dataset.dir=/nowhere",
        "dataset.image_shape=[28,28,1]",
        "train.batch_size=[8,24]",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    assert main() == 0
    output = capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert (
        "inside a host: 5 GB/s, 200 us to start; measured on 2 ranks; the fit is 0% off" in output
    )
    assert "between hosts: 0.1 GB/s, 300 us to start; measured on 4 ranks" in output
    assert content["global_batch"] == 2 * 8 + 2 * 24 and content["num_examples"] == 5000
    gradients = 4 * (784 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10)
    assert content["gradient_bytes"] == gradients
    expected = 0.1 + 3e-4 + 1.5 * gradients / 1e8
    assert content["costs"][-1]["step_seconds"] == pytest.approx(expected, rel=1e-3)
    row = next(line for line in output.splitlines() if line.split()[:1] == ["4"]).split()
    assert int(row[4]) == round(64 / content["costs"][-1]["step_seconds"]), "the global batch"
    # 136 + 16 examples for each of a rank's mean batch, 136 + 64 for the joint one.
    assert re.search(
        r"progress       \S+ times that of one rank: 4 ranks x \d+% parallel efficiency x 76% statistical ",
        output,
    )

    # The bytes that int8 sends, at the measured speed of bytes that are moved; compression takes time here too.
    seconds = {name: cost["step_seconds"] for name, cost in content["methods"].items()}
    assert seconds["strategy=horovod"] == pytest.approx(expected, rel=1e-3)
    local = 0.1 + (expected - 0.1) / 16
    assert seconds["strategy=local_sgd strategy.every=16"] == pytest.approx(local, rel=1e-3)
    moving = 0.126 / (3e-4 + 1.5 * (4 << 20) / 1e8)
    sent = moving * 1.5 * 1028 / 1024 / 4 * gradients / 1e8
    assert 0.1 + sent < seconds["strategy.compression=int8"] < 0.2 + sent
    assert re.search(
        r"strategy.compression=int8 +\d+\.\d +164\.\d kB +137 MB +\d\.\d+  8 bits", output
    ), output
    assert "\nadvice         none pays off: the reduction adds 7% to a step" in output


def test_a_run_is_measured_without_what_an_experiment_sets_for_its_files(tmp_path, monkeypatch):
    commands = []

    def train(line, cores, folder):
        commands.append(line)
        return SimpleNamespace(result={"step_seconds": 0.1})

    arguments = ["-np", "2", "--measure", "--examples", "5000", "--classes", "10"]
    arguments += ["experiment=imagenet_resnet50", "dataset.dir=/nowhere", "model=mlp"]
    arguments += ["dataset.image_shape=[8,8,3]", "train.steps_per_execution=50"]
    arguments += ["callbacks=early_stopping"]
    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    monkeypatch.chdir(tmp_path)
    assert main() == 0
    # Without "python -m hvtrain".
    config = composed(commands[0][3:])
    source = open_source(config)
    open_task_and_layers(config, source, is_resized=False)
    assert (source.name, source.image_shape, source.num_classes) == ("synthetic", (8, 8, 3), 10)
    assert config.train.steps_per_execution is None, "30 steps in one call would have no warm-up"
    assert source.num_examples("validation"), "early_stopping monitors it"


def test_a_run_is_measured_without_what_an_experiment_sets_for_its_strategy(tmp_path, monkeypatch):
    commands = []

    def train(line, cores, folder):
        commands.append(line)
        return SimpleNamespace(result={"step_seconds": 0.1})

    monkeypatch.setattr(command, "train", train)
    experiment = tmp_path / "experiment" / "mine.yaml"
    experiment.parent.mkdir()
    experiment.write_text("# @package _global_\nstrategy:\n  compression: fp16\n")
    overrides = [f"--config-dir={tmp_path}", "experiment=mine", "strategy.bucket_mib=5"]
    assert measured_step_seconds(overrides, 16, 1) == 0.1
    config = composed(commands[0][3:])
    assert isinstance(build(config, "strategy", Strategy), Strategy)


@pytest.mark.nightly
def test_measured_here():
    assert (
        0
        < measured_step_seconds(
            ["model=mlp", "run.dir=of_the_run", "train.batch_size=[8,16]"], 16, 1
        )
        < 10
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: -np; see python -m hvtrain plan --help"),
        (["-np", "0"], "0 is not a whole number of at least 1"),
        (["-np", "2", "--link-gbits", "-3"], "-3 is not a number of 0 or more"),
        (["-np", "2", "--step-seconds", "0"], "0 is not a number above 0"),
        (
            ["-np", "2", "--step-seconds", "1", "--measure"],
            "not allowed with argument --step-seconds",
        ),
        (["-np", "2", "--algorithm", "star"], "invalid choice: 'star'"),
        (
            ["-np", "2", "--linkgbits", "3"],
            "unknown option --linkgbits; see python -m hvtrain plan --help",
        ),
        (["-np", "2", "modle=cnn"], "unknown setting 'modle'"),
        (["-np", "2", "--advise"], "give -np 2 or more, and --step-seconds S or --measure"),
        (
            ["-np", "2", "strategy=parameter_server"],
            "strategy=virtual_ranks and parameter_server do not use; choose strategy=horovod",
        ),
        (
            ["-np", "2", "--calibrate", "none.json"],
            "--calibrate none.json cannot be read (FileNotFoundError: ",
        ),
    ],
)
def test_wrong_words_are_one_line(arguments, message, tmp_path):
    code, output, errors = run_command("hvtrain", "plan", *arguments, cwd=tmp_path)
    assert (code, output) == (2, "") and message in errors and len(errors.splitlines()) == 1, errors


def test_libraries_add_nothing_to_that_line(tmp_path):
    code, output, errors = python("-m", "hvtrain", "plan", "-np", "2", "modle=cnn", cwd=tmp_path)
    assert (
        (code, output) == (2, "")
        and "unknown setting 'modle'" in errors
        and len(errors.splitlines()) == 1
    ), errors


def test_what_does_not_fit_the_data_is_said():
    digits = from_dict(compose(["model=mlp"]))
    with pytest.raises(
        ConfigError, match="9999 ranks are more than the 1437 training examples of digits can feed"
    ):
        forecast(digits, 9999, 4, None, 10)
    with pytest.raises(
        ConfigError, match="--examples was given and digits has no setting image_shape"
    ):
        forecast(digits, 2, 4, 5000, 10)
    elsewhere = from_dict(compose(["dataset=image_folder", "dataset.dir=/nowhere", "model=mlp"]))
    with pytest.raises(DataError, match="for a data set on other machines give --examples N"):
        forecast(elsewhere, 2, 4, None, 10)


def test_epochs_are_padded_where_the_strategy_pads():
    def steps_per_epoch(*overrides):
        config = from_dict(compose(["model=mlp", *overrides]))
        return forecast(config, 2, 2, None, 10).plan.steps_per_epoch

    assert steps_per_epoch() == 23, "1,437 examples in batches of 64"
    assert steps_per_epoch("strategy=mirrored") == 22


def test_a_warm_up_longer_than_the_run_is_left_out():
    short = from_dict(compose(["train.steps=5", "model=mlp"]))
    assert [step for _, step in key_steps(forecast(short, 1, 1, None, 10))] == [0, 4]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"num_ranks": 2}',
        '{"num_ranks": "x", "seconds": {"hvtrain": {"4": [1]}}}',
        '{"num_ranks": 2, "seconds": {"hvtrain": {}}}',
    ],
)
def test_a_file_of_something_else_is_refused(content, tmp_path):
    path = tmp_path / "allreduce.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"cannot be read \(.*; give the allreduce\.json"):
        machine.read(Path(path))
