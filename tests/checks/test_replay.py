"""A run repeats its bits on real ranks; what keeps it from doing so is named; and so is the step at which two part."""

import hashlib
import json
import random
import re
import shutil
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from finished_runs import on_two_ranks
from hvtrain.checkpoint import receipts as receipts_module
from hvtrain.checkpoint.receipts import Receipt, ReceiptWriter, read_receipts
from hvtrain.checks.repeat import DigestRecording, Repetition
from hvtrain.checks.replay import judge, parse_steps
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.errors import ConfigError, StorageError
from hvtrain.system.run_files import RECEIPTS_FILE
from launching import run as run_ranks

pytestmark = pytest.mark.distributed

# Dropout, Adam's slots and shuffling: whatever is not restored shows. 9 steps an epoch, saved at 4, 8, 9, ..., 18.
TRAIN = [
    *(
        "dataset=table",
        "dataset.file=rows.csv",
        "dataset.target=kind",
        "model=mlp",
        "model.hidden=[8]",
    ),
    *(
        "model.dropout=0.2",
        "train.batch_size=16",
        "train.epochs=2",
        "train.deterministic=true",
        "run.report=false",
    ),
    *(
        "checkpoint.every_steps=4",
        "checkpoint.keep=50",
        "dataset.num_test=20",
        "dataset.num_validation=0",
    ),
]
SAVES = [4, 8, 9, 12, 16, 18]
DIGITS = [
    "dataset=digits",
    "train.deterministic=true",
    "checkpoint.every_steps=4",
    "checkpoint.keep=50",
    "train.steps=12",
]
KINDS = {
    "moving statistics": [
        "model=resnet20",
        "model.blocks_per_stage=1",
        "train.validate_every_steps=2",
    ],
    "accumulation": ["train.accumulate=2", "train.ema=0.9", "train.precision=mixed_float16"],
    "sharded optimizer": ["strategy.shard_optimizer=true", "strategy.compression=bf16"],
    "local steps": ["strategy=local_sgd", "strategy.every=4"],
    "errors kept": ["strategy.compression=powersgd", "strategy.whole_steps=2"],
    "callbacks": [
        "callbacks=[reduce_lr_on_plateau]",
        "augment=[random_translation]",
        "schedule=cosine",
    ],
}


def write_rows(path, shift=0):
    numbers = random.Random(1)
    rows = [[numbers.gauss(0, 1) for _ in range(4)] for _ in range(320)]
    rows[100][2] += shift
    lines = [
        ",".join([*(f"{value:.4f}" for value in row), ("no", "yes")[row[0] > row[1]]])
        for row in rows
    ]
    path.write_text("\n".join(["a,b,c,d,kind", *lines, ""]))


def cut(run, folder, last):
    """Copies a run as if it had been killed after a step."""
    shutil.copytree(run, folder)
    (folder / "result.json").unlink()
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > last:
            shutil.rmtree(path)


def flip_weight(checkpoint):
    """Changes one bit of a weight, and the checksums with it."""
    arrays = checkpoint / "state.safetensors"
    data = bytearray(arrays.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    begin = json.loads(data[8:end])["model/0000/dense1/kernel"]["data_offsets"][0]
    data[end + begin + 2] ^= 1
    arrays.write_bytes(data)
    sums = checkpoint / "SHA256SUMS"
    digest = hashlib.sha256(data).hexdigest()
    sums.write_text(re.sub(r"\w+(?=  state.safetensors)", digest, sums.read_text()))


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_local_steps_meet_where_an_interrupted_run_saved():
    calls = []
    taking = object.__new__(DigestRecording)
    taking.strategy = SimpleNamespace(settle=lambda: calls.append("settle"))
    taking.weights = SimpleNamespace(average_untrained=lambda: calls.append("average"))
    taking._record_digests = lambda: calls.append("take")
    taking._save({})
    assert calls == ["settle", "average", "take"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and what else its folder came to: two resumes from step 9, and a damaged checkpoint."""
    folder = tmp_path_factory.mktemp("replay")
    write_rows(folder / "rows.csv")
    results = on_two_ranks(folder, ["run", "train", *TRAIN, "run.dir=run"])
    assert results["run"]["error"] is None
    for name in ("resumed", "faster"):
        cut(folder / "run", folder / name, 9)
    shutil.copytree(folder / "run", folder / "flipped")
    flip_weight(folder / "flipped/checkpoints/step-00000016")
    return folder


def lines(result):
    """The exit code, and the lines after the one that says what is repeated."""
    assert result["error"] is None
    return result["code"], [
        line for line in result["printed"].splitlines() if not line.startswith("repeating ")
    ]


@pytest.fixture(scope="module")
def results(folder):
    before = content(folder / "run")
    results = on_two_ranks(
        folder,
        ["resumed", "train", *TRAIN, "run.dir=resumed"],
        ["faster", "train", *TRAIN, "run.dir=faster", "optimizer.learning_rate=0.003"],
        ["last", "replay", "run=run"],
        ["whole", "replay", "run=resumed", "steps=0:18"],
        ["rate", "replay", "run=run", "steps=5:12", "optimizer.learning_rate=0.01"],
        ["flipped", "replay", "run=flipped"],
        ["no receipt", "replay", "run=run", "steps=18:30"],
        ["equal", "bisect", "run=run", "with=resumed"],
        ["parted", "bisect", "run=run", "with=faster"],
        ["alone", "bisect", "run=run"],
        ["best", "replay", "run=run", "checkpoint=best"],
    )
    assert content(folder / "run") == before, "a replay writes nothing into the run's folder"
    return results


@pytest.mark.nightly
def test_every_kind_of_state_has_the_same_bits_again(tmp_path):
    tasks = []
    for name, settings in KINDS.items():
        settings = [
            *DIGITS,
            "model=mlp",
            "dataset.num_validation=100",
            *settings,
            "run.report=false",
        ]
        tasks += [
            [f"{name} trained", "train", *settings, f"run.dir={name}"],
            [name, "replay", f"run={name}", "steps=5:12"],
        ]
    results = on_two_ranks(tmp_path, *tasks)
    same = "same bits: 3 receipts of steps 4 to 12\n"
    assert {
        name: (results[name]["printed"][-len(same) :], results[name]["error"]) for name in KINDS
    } == dict.fromkeys(KINDS, (same, None))


def test_each_checkpoint_leaves_a_receipt(folder):
    receipts = read_receipts(folder / "run")
    assert list(receipts) == SAVES
    facts = receipts[18].facts
    assert (
        facts["ranks"] == {"number of ranks": 2}
        and facts["settings"]["optimizer.learning_rate"] == 0.001
        and facts["settings"]["checkpoint.every_steps"] == 4
        and "checkpoint.keep" not in facts["settings"]
    )
    assert {"data", "code", "versions", "hardware"} <= facts.keys()
    digests = receipts[18].digests
    assert "model/0000/dense1/kernel" in digests and any("momentum" in key for key in digests)
    assert len(
        {receipt.digests["model/0000/dense1/kernel"] for receipt in receipts.values()}
    ) == len(SAVES)


def test_a_stretch_has_the_same_bits_from_a_checkpoint_and_from_the_beginning(results):
    assert lines(results["last"]) == (0, ["same bits: 2 receipts of steps 16 to 18"])
    assert lines(results["whole"]) == (0, ["same bits: 6 receipts of steps 4 to 18"])
    assert re.fullmatch(
        r"repeating steps 0 to 18 of \S+/resumed on 2 rank\(s\)",
        results["whole"]["printed"].split("\n")[0],
    )


def test_steps_that_are_trained_again_are_noted_and_the_newer_receipts_count(folder, results):
    lines = [
        json.loads(line) for line in (folder / "faster" / RECEIPTS_FILE).read_text().splitlines()
    ]
    assert [line["first_step"] for line in lines if "facts" in line] == [0, 9]
    notes = {name: re.findall('"repeated": "(.*?)"', (folder / name / RECEIPTS_FILE).read_text())
             for name in ("run", "resumed", "faster")}  # fmt: skip
    assert notes == {"run": [], "resumed": 3 * ["same bits"], "faster": 3 * ["different bits"]}
    assert list(read_receipts(folder / "faster")) == SAVES


def test_another_learning_rate_is_named(results):
    code, (first, *causes, difference) = lines(results["rate"])
    assert code == 1
    assert re.fullmatch(r"differs at step 8: dense1/kernel \(\d+ of 13 variables differ\)", first)
    assert causes == [
        "the last step with the same bits: 4",
        "cause: settings: optimizer.learning_rate is 0.001 and 0.01",
    ]
    assert re.fullmatch(r"largest relative difference of a weight at step 12: \S+", difference)


def test_a_flipped_bit_in_a_checkpoint_is_named(results):
    assert lines(results["flipped"]) == (
        1,
        [
            "differs at step 16: dense1/kernel (1 of 13 variables differ)",
            "cause: the checkpoint has changed since it was written",
        ],
    )


def test_changed_data_and_another_number_of_ranks_are_named(folder, results):
    write_rows(folder / "rows.csv", shift=1)
    code, output = run_ranks(
        None, 1, "python", "-m", "hvtrain", "replay", "run", "steps=8:12", cwd=folder
    )
    assert code == 1, output
    assert re.search("(?m)^differs at step 9: dense1/kernel", output)
    assert re.search(
        r"(?m)^cause: data: digest of train is \w+ and \w+; digest of the manifest is", output
    ), "the values of a table are part of its manifest"
    assert re.search("(?m)^cause: ranks: number of ranks is 2 and 1$", output)


def test_two_runs_part_at_a_step(results):
    assert lines(results["equal"]) == (0, ["same bits: 6 receipts of steps 4 to 18"])
    assert lines(results["parted"]) == (
        1,
        [
            "the runs diverge between steps 9 and 12",
            "cause: settings: optimizer.learning_rate is 0.001 and 0.003",
            # Adam's moments depend on the gradients alone, which are still the same.
            "first at step 10: dense1/kernel (4 of 13 variables differ)",
        ],
    )


def test_what_cannot_be_repeated_is_refused_in_one_line(results):
    assert re.search(
        r"has no receipt after step 18 up to 30 \(there are: 4, 8, 9, 12, 16, 18\)",
        results["no receipt"]["error"],
    )
    assert (
        results["alone"]["error"]
        == "ConfigError: with=RUN is missing; name the folder of the other run"
    )
    assert re.search("checkpoint= has no effect here: .*; leave it out", results["best"]["error"])
    for text in ("x", "5", "5:5", "9:4", "-1:4"):
        with pytest.raises(ConfigError, match=f"steps={text} is not FROM:TO with FROM below TO"):
            parse_steps(text)


def test_damaged_receipts_are_refused_and_an_unfinished_line_is_none(folder, tmp_path):
    with pytest.raises(
        StorageError, match=r"receipts.jsonl is missing; choose a run that has written a checkpoint"
    ):
        read_receipts(tmp_path)
    text = (folder / "run" / RECEIPTS_FILE).read_text()
    (tmp_path / RECEIPTS_FILE).write_text(text[:-20])
    assert list(read_receipts(tmp_path)) == SAVES[:-1]
    for damaged in (
        text.replace('"step"', '"stop"'),
        text.replace("{", "", 1),
        "[]\n",
        '{"step": []}\n',
        text.replace('"facts": {', '"facts": {"x": 1, '),
    ):
        (tmp_path / RECEIPTS_FILE).write_text(damaged)
        with pytest.raises(StorageError, match=r"is damaged .*; restore it or move it away"):
            read_receipts(tmp_path)


def test_without_deterministic_operations_a_small_difference_is_excused(tmp_path):
    facts = {"ranks": {"number of ranks": 3}}
    receipts = {step: Receipt(facts, {"model/0000/a/kernel": str(step)}) for step in (10, 20)}

    def judged(difference, tolerance, now=facts):
        digests = {10: {"model/0000/a/kernel": "10"}, 20: {"model/0000/a/kernel": "other"}}
        repetition = Repetition(tmp_path, 10, (20,), False, 20, now, digests, difference)
        code, lines = judge(receipts, repetition, tolerance)
        return code, "\n".join(lines)

    code, text = judged(1e-6, 1e-4)
    assert (
        code == 0
        and "train.deterministic=false" in text
        and text.endswith("within the tolerance of 0.0001")
    )
    assert judged(1e-3, 1e-4)[0] == 1
    code, text = judged(1e-6, None)
    assert code == 1 and "cause: none that receipts show, and operations are deterministic" in text
    code, text = judged(1e-6, 1e-4, {"ranks": {"number of ranks": 2}})
    assert code == 1 and "cause: ranks: number of ranks is 3 and 2" in text


def test_the_file_is_bounded_and_a_receipt_that_cannot_be_written_stops_nothing(
    tmp_path, monkeypatch, caplog
):
    config = from_dict(compose(["model=mlp"])).checkpoint
    monkeypatch.setattr(receipts_module, "MAX_BYTES", 3000)
    facts = {"ranks": {"number of ranks": 2}}

    def trained(first, last):
        writer = ReceiptWriter(tmp_path / "checkpoints", config)
        writer.begin(first, lambda: facts)
        for step in range(first + 1, last + 1):
            arrays = {
                "model/0000/w": np.full(3, step, ml_dtypes.bfloat16),
                "rank/0/seed/0000": np.zeros(2),
            }
            writer.submit(step, arrays, {"metrics": {}, "epoch": 0, "step_in_epoch": step})
        assert writer.finish() == last

    trained(0, 40)
    trained(30, 45)
    receipts = read_receipts(tmp_path)
    path = tmp_path / RECEIPTS_FILE
    assert path.stat().st_size <= 3000
    assert path.read_text().count('"facts"') == 1, "equal facts are written once"
    assert [*range(41, 46)] == [step for step in receipts if step > 40]
    assert len(receipts) > 12 and min(receipts) < 20, "the older half is thinned, not dropped"
    assert receipts[45].digests.keys() == {"model/0000/w"} and receipts[45].facts == facts

    path.write_text("damaged\n")
    trained(45, 46)
    assert "the receipt of step 46 was not written: StorageError: " in caplog.text
    assert path.read_text() == "damaged\n"
