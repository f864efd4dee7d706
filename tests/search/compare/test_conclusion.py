"""What a comparison says of given figures: no run is started."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hvtrain.errors import ConfigError
from hvtrain.launch.child import ONLY_STEPS, Training
from hvtrain.report.ratios import Ratio
from hvtrain.search.compare.command import write
from hvtrain.search.compare.conclusion import (
    compare_speeds,
    plan_arguments,
    ratio_text,
    scaling_conclusions,
    speed_conclusions,
)
from hvtrain.search.compare.contest import ORDER, WHOLE, Contest, Contestant, contestants
from hvtrain.search.compare.results import curve, default_target, summary, table, time_to_target
from hvtrain.system.run_files import EpochRecord
from hvtrain.system.text import aligned

SINGLE, HOROVOD = (
    Contestant("single", "single", (), differences=(ORDER,)),
    Contestant("horovod", "horovod", ()),
)
MIRRORED = Contestant("mirrored", "mirrored", ())
STEADY = {number: 100.0 + number for number in range(1, 7)}


def times(factor: float, speeds: dict[int, float] = STEADY) -> dict[int, float]:
    """Speeds in the same rounds, so much faster."""
    return {number: factor * speed for number, speed in speeds.items()}


def training(speed: float, accuracies: tuple[float, ...] = (), batch: int = 64, **more) -> Training:
    """A run with one epoch of 10 steps and 2 s for each accuracy."""
    epochs = [
        # 2 s of steps, and 1 s of validation between them.
        EpochRecord(at, 10 * at, 0.1, 3.0, 5 * batch, {"loss": 1 / at, "val_accuracy": value})
        for at, value in enumerate(accuracies, 1)
    ]
    result = {
        "examples_per_second": speed,
        "step_seconds": batch / speed,
        "split": None,
        "global_batch": batch,
    }
    result |= {
        "num_steps": 10 * len(epochs),
        "metrics": {"test_accuracy": accuracies[-1]} if accuracies else {},
    }
    return Training({**result, **more}, epochs, 30.0, 12.5, 500_000_000, None)


def compared(errors: dict[str, str] | None = None, target: tuple[str, float] | None = None) -> dict:
    """A comparison of three, of which the third failed in its whole run."""
    rounds = {
        name: {n: training(speed) for n, speed in times(by).items()} for name, by in SPEEDS.items()
    }
    whole = {
        "single": training(100, (0.5, 0.9)),
        "horovod": training(134, (0.6, 0.8, 0.85), differences=["stale"]),
    }
    errors = {"mirrored": "the whole run: no GPU <here>"} if errors is None else errors
    contest = Contest(
        [SINGLE, HOROVOD, MIRRORED], 2, Path(), 6, 100, rounds=rounds, whole=whole, errors=errors
    )
    return summary(contest, target)


SPEEDS = {"single": 1.0, "horovod": 1.34, "mirrored": 0.89}


def test_a_clear_difference_is_stated_with_its_confidence() -> None:
    speeds = {name: times(by) for name, by in SPEEDS.items()}
    assert speed_conclusions(speeds) == [
        "Fastest here: horovod, with 139 examples/s.",
        "Slower: single 0.75 times (0.75 to 0.75 with 97% confidence); mirrored 0.66 times (0.66 to 0.66 with 97% "
        "confidence) as fast as horovod.",
    ]
    pays, does_not = scaling_conclusions(speeds, 2)
    assert pays.startswith("horovod pays off here on 2 ranks: 1.34 times") and pays.endswith(
        "an efficiency of 67%."
    )
    assert does_not.startswith(
        "mirrored does not pay off on 2 ranks here: 0.89 times (0.89 to 0.89 with 97%"
    )


def test_an_interval_that_holds_1_is_no_difference() -> None:
    noisy = {number: speed * (1.3 if number % 2 else 0.8) for number, speed in STEADY.items()}
    most, same = speed_conclusions({"single": STEADY, "horovod": noisy})
    assert most.startswith("Most examples/s here: ") and same.startswith(
        "Not distinguishable from it: "
    )
    assert not scaling_conclusions({"single": STEADY, "single@train.jit_compile=true": noisy}, 2)
    (scaling,) = scaling_conclusions({"single": STEADY, "horovod": noisy}, 2)
    assert scaling.endswith("not distinguishable from it.") and " pays" not in scaling


@pytest.mark.parametrize("rounds", [1, 2])
def test_few_rounds_are_no_confidence(rounds: int) -> None:
    few = {number: STEADY[number] for number in range(1, rounds + 1)}
    speed_ratio = compare_speeds(times(2.0, few), few)
    assert (
        speed_ratio
        and speed_ratio.median == pytest.approx(2)
        and ratio_text(speed_ratio) == "2.00 times"
    )
    speeds = {"single": few, "horovod": times(2.0, few)}
    assert scaling_conclusions({**speeds, "mirrored": times(3.0, few)}, 2) == [
        "Too few rounds to say whether 2 ranks would pay off: horovod 2.00 times, mirrored 3.00 times as fast as "
        "one process."
    ]
    assert speed_conclusions(speeds)[0].startswith("Most ") and speed_conclusions(speeds)[
        1
    ].startswith("Too few rounds to say: single")
    assert "confidence" in ratio_text(Ratio(2.0, 1.9, 2.1, 0.75))


def test_only_rounds_that_both_ran_are_compared() -> None:
    """A strategy that failed or was interrupted has fewer; its rounds must not meet those of another time."""
    speed_ratio = compare_speeds({2: 10.0, 3: 20.0}, {1: 1.0, 2: 10.0, 3: 20.0, 4: 99.0})
    assert speed_ratio and speed_ratio.median == 1.0 and speed_ratio.coverage == 0.5, "two rounds"
    assert compare_speeds({1: 1.0}, {2: 1.0}) is None
    assert speed_conclusions({"single": {1: 2.0}, "horovod": {2: 1.0}}) == [
        "Most examples/s here: single, with 2 examples/s.",
        "No round in common with single, so not compared: horovod.",
    ]
    assert speed_conclusions({"single": {1: 1.0}, "horovod": {}}) == [
        "Fewer than two strategies were timed, so nothing can be compared."
    ]


def test_time_to_the_target_is_that_of_the_first_epoch_which_reaches_it() -> None:
    epochs = curve(training(100, (0.5, 0.9, 0.7)))
    assert time_to_target(epochs, "val_accuracy", 0.9) == (2, 4.0)
    assert time_to_target(epochs, "loss", 0.5) == (2, 4.0), "a loss falls"
    assert (
        time_to_target(epochs, "val_accuracy", 0.91) is None
        and time_to_target(epochs, "unknown", 0.1) is None
    )
    assert default_target([epochs, curve(training(100, (0.85,)))]) == ("val_accuracy", 0.85), (
        "all of them reach it"
    )
    assert default_target([]) is None


def test_the_summary_joins_rounds_and_whole_runs() -> None:
    comparison = compared()
    single, horovod, mirrored = comparison["strategies"]
    assert comparison["target"] == {"metric": "val_accuracy", "value": 0.85}
    assert (single["target_seconds"], horovod["target_epoch"], mirrored["target_seconds"]) == (
        4.0,
        3,
        None,
    )
    assert single["differences"] == [ORDER] and horovod["differences"] == ["stale"]
    assert (
        horovod["against_single"]["median"] == pytest.approx(1.34)
        and single["against_single"] is None
    )
    assert [point["examples"] for point in horovod["curve"]] == [640, 1280, 1920]
    assert mirrored["error"] and mirrored["examples_per_second"] == pytest.approx(0.89 * 103.5)
    assert "mirrored failed: the whole run: no GPU <here>" in comparison["conclusion"]
    assert any("on different numbers of examples" in line for line in comparison["conclusion"]), (
        "1280 against 1920"
    )


def test_a_target_that_no_run_has_is_named() -> None:
    lines = compared(target=("val_acuracy", 0.9))["conclusion"]
    assert "val_acuracy is not a metric of these runs; they have loss, val_accuracy." in lines


def test_the_table_has_a_line_for_each_strategy() -> None:
    head, single, _, mirrored = table(compared())
    assert head[:4] == ["strategy", "examples/s", "against single", "s to val_accuracy 0.85"]
    assert single == ["single", "104", "-", "4.0 (epoch 2)", "0.9000", "500", "12", "30"]
    assert mirrored[0] == "mirrored" and mirrored[-1] == "failed"
    assert len({len(line) for line in aligned(table(compared()))}) == 1


def test_the_page_needs_nothing_from_elsewhere(tmp_path) -> None:
    facts = {
        "command": "python -m hvtrain compare <x>",
        "date": "2026-11-24 20:00",
        "machine": {"host": "here"},
    }
    facts |= {"num_rounds": 6, "speed_steps": 100, "versions": {"keras": "3"}, "interrupted": False}
    write({**facts, **compared()}, tmp_path)
    page = (tmp_path / "compare.html").read_text()
    assert json.loads((tmp_path / "compare.json").read_text())["num_ranks"] == 2
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert page.count("<svg") == 4 and "var(--series-1)" in page and "var(--ink)" in page
    assert "&lt;here&gt;" in page and "<here>" not in page, "what runs print is text"
    links = re.findall(r"""(?:src|href)=["']([^"'#][^"']*)""", page)
    assert (
        all(link.startswith("data:") for link in links)
        and "@import" not in page
        and "<script" not in page
    )
    assert "<metadata" not in page and "prefers-color-scheme: dark" in page


def test_without_any_measurement_the_page_says_so(tmp_path) -> None:
    facts = {
        "command": "x",
        "date": "d",
        "machine": {},
        "num_rounds": 6,
        "speed_steps": 9,
        "versions": {},
    }
    secret = replace(HOROVOD, overrides=("dataset.api_key=hunter2",))
    comparison = {
        **facts,
        "interrupted": True,
        **summary(Contest([SINGLE, secret], 2, tmp_path, 6, 9), None),
    }
    write(comparison, tmp_path)
    assert "hunter2" not in (tmp_path / "compare.json").read_text()
    page = (tmp_path / "compare.html").read_text()
    assert (
        "interrupted" in page
        and "did not train" in page
        and not (tmp_path / "compare.png").exists()
    )


def test_rounds_are_interleaved_and_whole_runs_follow(tmp_path) -> None:
    contest = Contest([SINGLE, HOROVOD], 2, tmp_path, 2, 100)
    order = [(contestant.name, number) for contestant, number in contest.schedule()]
    assert order == [
        *(("single", 1), ("horovod", 1), ("horovod", 2), ("single", 2)),
        *(("single", WHOLE), ("horovod", WHOLE)),
    ]
    assert len(replace(contest, speed_only=True).schedule()) == 4
    assert contest.time_left(contest.schedule()) == "left: 6 runs of unknown length"


def test_commands_are_the_launchers_and_one_process_needs_none(tmp_path) -> None:
    servers = replace(HOROVOD, has_servers=True)
    contest = Contest(
        [], 2, tmp_path, 6, 9, host_options=("-H", "a:1,b:1"), num_ps=2, single_cores=1
    )
    assert contest.command(SINGLE, ["model=mlp"], tmp_path)[1:] == [
        "-m",
        "hvtrain",
        "model=mlp",
        f"run.dir='{tmp_path}'",
        "notify=[]",
    ]
    assert contest.command(HOROVOD, [], tmp_path)[2:-2] == [
        "hvtrain",
        "launch",
        "-np",
        "2",
        "-H",
        "a:1,b:1",
        "--",
    ]
    assert contest.command(servers, [], tmp_path)[-5:-2] == ["--num-ps", "2", "--"]
    assert len(contest.cores(SINGLE)) == 1
    assert contest.cores(HOROVOD) == replace(contest, single_cores=None).cores(SINGLE)


def settings_of(contestant: Contestant) -> dict[str, str]:
    return dict(setting.split("=", 1) for setting in contestant.overrides)


def test_one_process_trains_as_the_ranks_together_do() -> None:
    common = [
        "strategy=single,horovod",
        "model=mlp",
        "train.batch_size=16",
        "optimizer.learning_rate=0.001",
    ]
    common += ["train.steps=100", "train.divide_steps_by_size=true", "schedule.warmup_epochs=0"]
    single, horovod = contestants(common, 4)
    mine = settings_of(single)
    assert (mine["train.batch_size"], mine["train.steps"]) == ("64", "25")
    assert float(mine["optimizer.learning_rate"]) == pytest.approx(0.004)
    assert single.differences == [ORDER] and horovod.differences == []
    assert settings_of(horovod)["train.batch_size"] == "16"
    by_root = contestants(
        [*common, "train.learning_rate_scale=sqrt", "schedule.warmup_epochs=1"], 4
    )[0]
    assert float(settings_of(by_root)["optimizer.learning_rate"]) == pytest.approx(0.002)
    assert any("warm-up" in text for text in by_root.differences)
    from_a_rate = ["schedule.warmup_epochs=1", "schedule.warmup_from=0.0001"]
    assert contestants([*common, *from_a_rate], 4)[0].differences == [ORDER]
    of_rank = contestants(common, 4, "rank")[0]
    assert settings_of(of_rank)["train.batch_size"] == "16" and len(of_rank.differences) == 2


def test_a_strategy_may_have_settings_of_its_own() -> None:
    plain, small = contestants(
        ["strategy=horovod,horovod@compression=fp16@train.accumulate=4", "model=mlp"], 2
    )
    assert settings_of(small)[
        "strategy.compression"
    ] == "fp16" and "strategy.compression" not in settings_of(plain)
    assert "train.steps=12" in small.speed_overrides(10), "whole accumulations"


def test_short_runs_time_no_first_steps_that_differ_from_the_others() -> None:
    names = "strategy=horovod@compression=powersgd,local_sgd@warmup_steps=200,single"
    power, local, single = contestants([names, "model=mlp"], 2)
    assert power.speed_overrides(100)[-len(ONLY_STEPS) - 2] == "strategy.whole_steps=0"
    assert local.speed_overrides(100)[-len(ONLY_STEPS) - 2] == "strategy.warmup_steps=0"
    assert "strategy.warmup_steps=200" in local.overrides and list(single.steady) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "strategy= does not name two or more different strategies"),
        (["strategy=single"], "strategy=single does not name two or more different strategies"),
        (["strategy=single,horovd"], "did you mean strategy=horovod?"),
        (["strategy=single,horovod,single"], "two or more different strategies; give them as in"),
        (
            ["strategy=single,horovod", "run.dir=x"],
            "run.dir=x was given, but each strategy has its own run folder",
        ),
        (["strategy=single,horovod", "model=cnnn"], "model=cnnn is not one of application, cnn"),
        (["strategy=single,horovod@compresion=fp16"], "did you mean 'strategy.compression'?"),
        (["strategy=single,horovod", "train.batch_size=[2,4]"], "compare needs one number for all"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        contestants(arguments, 2)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_runs_that_would_end_without_results_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.max_time=1m may end runs before they have"):
        contestants(["strategy=single,horovod", "train.max_time=1m"], 2)


def test_no_plan_for_ranks_that_were_measured() -> None:
    split = {"data_seconds": 0.1, "compute_seconds": 0.2}
    entry = {"name": "horovod", "rounds": [{"split": split}], "overrides": []}
    comparison = {"num_ranks": 16, "strategies": [entry]}
    assert plan_arguments(comparison, 16) is None
    assert plan_arguments(comparison, 32) is not None
