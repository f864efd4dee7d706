"""python -m hvtrain inspect: what it says of real files and of a user's own data, in this process, without ranks."""

import json
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import hvtrain
from browser import CHROMIUM, SIZES, Browser
from hvtrain.checks import inspect
from hvtrain.checks.examine_data import examine, image_of
from hvtrain.data import from_arrays, from_dataset, write_tfrecords
from hvtrain.errors import ConfigError, DataError
from hvtrain.finished.commands import evaluate, predict
from shards import write_shards
from tiny_data import random_images, write_folder

HERE = Path(__file__).stem


def inspected(monkeypatch, capsys, folder, *arguments):
    """The exit code, what was printed, and the page."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["inspect", *map(str, arguments)])
    code = inspect.main()
    return code, capsys.readouterr().out, (folder / "inspect.html").read_text()


def write_leaves(folder):
    """Twelve training images of three classes; test lacks a class, repeats one of train, and has a damaged file."""
    images, labels = random_images(12)
    write_folder(folder / "train", images, labels)
    write_folder(folder / "test", images[:1], labels[:1])
    write_folder(folder / "test", *random_images(2, seed=1))
    damaged = folder / "test" / "class_1" / "0001.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    return damaged


def test_damaged_repeated_and_missing_images_are_named(tmp_path, monkeypatch, capsys):
    write_folder(tmp_path / "leaves" / "test", *random_images(3, seed=2))
    damaged = write_leaves(tmp_path / "leaves")
    words = ["dataset=image_folder", "dataset.dir=leaves", "dataset.image_shape=[6,6,1]"]
    code, output, page = inspected(monkeypatch, capsys, tmp_path, *words)
    assert code == 2
    assert re.search(rf"refused: {damaged.relative_to(tmp_path)}: .+", output)
    assert re.search(r"class_2 +4 \(33%\) +1 \(\d+%\)", output)
    assert page.count("data:image/png;base64,") == 12 + 4 and "class_1" in page
    assert "http" not in page.split("</style>")[1]

    code, output, _ = inspected(monkeypatch, capsys, tmp_path, *words, "data.on_error=skip")
    assert code == 0 and f"look at: {damaged.relative_to(tmp_path)}" in output


def test_images_are_shown_as_training_and_validation_give_them(tmp_path):
    write_folder(tmp_path / "train", *random_images(12))
    words = ["dataset=image_folder", f"dataset.dir={tmp_path}", "dataset.image_shape=[6,6,1]"]
    views = examine(hvtrain.compose(words), 100, has_task=False).views
    straight = []
    for (whole, _), *draws, (plain, _) in views:
        np.testing.assert_allclose(whole / 255, plain, atol=1e-6)
        assert all(
            np.array_equal(draw, plain) or np.array_equal(draw[:, ::-1], plain) for draw, _ in draws
        )
        straight += [np.array_equal(draw, plain) for draw, _ in draws]
    assert len(straight) == 12 and 0 < sum(straight) < 12, "the data set flips half of the images"

    for (whole, _), *draws, (plain, _) in examine(
        hvtrain.compose([*words, "augment=[random_rotation]"]), 100, has_task=False
    ).views:
        np.testing.assert_allclose(whole / 255, plain, atol=1e-6)
        assert len({draw.tobytes() for draw, _ in draws}) == 3, (
            "layers of augment draw anew each time"
        )


def test_images_with_transparency_are_shown_without_it():
    pixels = np.arange(80).reshape(4, 5, 4)
    assert np.array_equal(image_of({"name": np.array("x"), "image": pixels}), pixels[..., :3])
    assert image_of(pixels[..., :2]) is None


def test_examples_in_train_and_test_and_repeats_with_another_target(tmp_path, monkeypatch, capsys):
    images, labels = random_images(40)
    images[7] = images[2]
    images[9] = images[3]
    labels[labels == 2] = 1
    labels[7] = 0
    labels[20] = 2
    arrays = {"x": images, "y": labels, "x_test": images[[5, 30]], "y_test": labels[[5, 30]]}
    np.savez(tmp_path / "own.npz", **arrays)
    (tmp_path / "conf" / "dataset").mkdir(parents=True)
    (tmp_path / "conf" / "dataset" / "own.yaml").write_text(
        f"_target_: {HERE}.own_arrays\npath: own.npz\n"
    )
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    code, output, _ = inspected(
        monkeypatch, capsys, tmp_path, "--config-dir", "conf", "dataset=own"
    )
    assert code == 0, output
    assert (
        "look at: train: 2 of 40 examples repeat an earlier one, 1 with another target; example 7 repeats example 2\n"
        in output
    )
    assert (
        "look at: test: 2 of 2 examples are in train too; example 0 repeats example 5 of train\n"
        in output
    )
    assert "look at: test has no 2\n" in output

    code, output, _ = inspected(
        monkeypatch, capsys, tmp_path, "--config-dir", "conf", "dataset=own", "--limit=10"
    )
    assert "read     10 of 40 train, 2 of 2 test examples." in output


def own_arrays(path):
    data = np.load(path)
    return from_arrays(
        data["x"], data["y"], data["x_test"], data["y_test"], name="own", num_classes=3
    )


def pipeline(shard, num_shards, split="train"):
    import tensorflow as tf

    inputs = {
        "age": np.arange(12, dtype=np.float32)[:, None],
        "note": np.array([f"note {i}" for i in range(12)]),
    }
    targets = np.arange(12, dtype=np.int32) % 4
    if split != "train":
        return None
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).shard(num_shards, shard)


def own_pipeline():
    return from_dataset(pipeline, num_classes=3)


def write_table(folder):
    rows = [
        f"{20 + number},{'Rome' if number % 3 else 'Oslo'},{number % 2}" for number in range(40)
    ]
    (folder / "people.csv").write_text("\n".join(["age,city,buys", *rows]) + "\n")


def write_masks(folder):
    for number in range(3):
        for kind in ("images", "masks"):
            (folder / "scenes" / "train" / kind).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"scenes/train/images/{number}.png")
        Image.fromarray((pixels[..., 0] % 3).astype(np.uint8)).save(
            folder / f"scenes/train/masks/{number}.png"
        )


def write_records(folder):
    write_tfrecords(folder / "records", "train", *random_images(9), num_files=2)


def write_tar_files(folder):
    write_shards(folder / "shards", "train", *random_images(9), num_shards=2)


def write_text(folder):
    (folder / "tales.txt").write_text("Once upon a time there was a sentence. " * 300)


def write_pipeline(folder):
    (folder / "conf" / "dataset").mkdir(parents=True)
    (folder / "conf" / "dataset" / "own.yaml").write_text(f"_target_: {HERE}.own_pipeline\n")


SCENES = [
    "dataset=segmentation_folder",
    "dataset.dir=scenes",
    "dataset.image_shape=[8,8,3]",
    "dataset.num_classes=3",
]
RECORDS = [
    "dataset=tfrecord",
    "dataset.dir=records",
    "dataset.image_shape=[6,6,1]",
    "dataset.num_classes=3",
]
SHARDS = [
    "dataset=webdataset",
    "dataset.dir=shards",
    "dataset.image_shape=[6,6,1]",
    "dataset.num_classes=3",
]
TEXT = [
    "dataset=text",
    "dataset.file=tales.txt",
    "dataset.vocabulary_size=300",
    "dataset.length=16",
]
TABLE = ["dataset=table", "dataset.file=people.csv", "dataset.target=buys", "dataset.num_test=10"]
OWN = ["--config-dir", "conf", "dataset=own"]
# What writes the files, the settings, the exit code, what is printed, and what is on the page.
CASES = {
    "table": (write_table, TABLE, 0, r"people: 30 train, 10 test\n", "Rome"),
    "masks": (
        write_masks,
        SCENES,
        0,
        r"train +targets +whole numbers, 8 x 8 +0 +2",
        "Masks are painted over the images",
    ),
    "records": (
        write_records,
        RECORDS,
        0,
        r"train +inputs +numbers, 6 x 6 x 1 +0 +1 ",
        "The first training batch, ",
    ),
    "shards": (
        write_tar_files,
        SHARDS,
        0,
        r"train +inputs +numbers, 6 x 6 x 1 +0 +1 ",
        "The whole image, 3 random augmentations of it, ",
    ),
    "text": (write_text, TEXT, 0, r"tales: \d+ train", "Once upon a time"),
    "own function": (write_pipeline, OWN, 2, r"inputs.age +numbers, 1 +0 +11", "note 2"),
    "wrong task": (
        write_table,
        [*TABLE, "task=segmentation"],
        2,
        "refused: task=segmentation: the target ",
        "Rome",
    ),
    "too few rows": (
        write_table,
        [*TABLE, "dataset.num_test=50"],
        2,
        "refused: .*num_test=50",
        "Refused",
    ),
}


@pytest.fixture(scope="module")
def browser():
    with Browser() if CHROMIUM else nullcontext() as chrome:
        yield chrome


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_data_set(name, tmp_path, monkeypatch, capsys, browser):
    write, words, expected_code, printed, on_page = CASES[name]
    write(tmp_path)
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    code, output, page = inspected(monkeypatch, capsys, tmp_path, *words)
    assert code == expected_code, output
    assert re.search(printed, output), output
    assert re.search(on_page, page)
    for size in SIZES if browser else ():
        browser.open(tmp_path / "inspect.html", size)
        assert browser.too_wide() == [] and browser.problems == []
        assert browser.evaluate(
            "[...document.images].every(image => image.complete && image.naturalWidth)"
        )
    if name == "own function":
        assert "refused: train: labels outside 0 ... 2 (count: 3); fix the targets\n" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "0"], "0 is not a whole number of at least 1"),
        (
            ["--output", "nowhere/page.html"],
            "--output nowhere/page.html: there is no folder nowhere",
        ),
        (["dataset=image_folder", "dataset.dir=nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_inspected_is_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["inspect", *words])
    with pytest.raises((ConfigError, DataError), match=re.escape(message)) as caught:
        inspect.main()
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


SHORT_RUN = ["model=mlp", "strategy=single", "checkpoint.every_steps=1"]


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds") / "run"
    hvtrain.train(hvtrain.compose([*SHORT_RUN, "train.steps=2", f"run.dir={folder}"]))
    return folder


def test_a_run_keeps_what_its_data_were(digits_run):
    result = json.loads((digits_run / "result.json").read_text())
    assert result["data"]["splits"] == ["train 1,437", "test 360"] and result["data"][
        "classes"
    ] == ["10, 10% each"]
    kinds = json.loads((digits_run / "kinds.json").read_text())
    assert kinds["inputs"] == {
        "": {"type": "numbers", "shape": [8, 8, 1], "low": 0.0, "high": 1.0, "large": 1.0}
    }
    page = (digits_run / "report.html").read_text()
    assert "<h2>The data</h2>" in page and page.count("10, 10% each") == 1


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (
            predict,
            ["input=dark.npy"],
            "dark.npy differs in kind from the run's training data: values are ",
        ),
        (
            evaluate,
            ["dataset=shapes"],
            "shapes differs in kind from the run's training data: images have 3 channels",
        ),
        (
            evaluate,
            ["dataset=synthetic", "dataset.image_shape=[9,9,1]"],
            "inputs of synthetic are 9 x 9 x 1, were 8 x 8 x 1",
        ),
    ],
    ids=["range", "channels", "size"],
)
def test_other_data_of_another_kind_are_refused(
    command, words, message, digits_run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "dark.npy", np.random.default_rng(0).random((5, 8, 8)))
    monkeypatch.setattr(sys, "argv", ["x", f"run={digits_run}", *words])
    with pytest.raises(Exception, match=re.escape(message)):
        command()


def test_a_resumed_run_reads_inputs_of_the_same_kind(digits_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(digits_run, folder)
    kinds = json.loads((folder / "kinds.json").read_text())
    kinds["inputs"][""] |= {"high": 255.0, "large": 250.0}
    (folder / "kinds.json").write_text(json.dumps(kinds))
    words = [*SHORT_RUN, "train.steps=4", "run.report=false", f"run.dir={folder}"]
    with pytest.raises(
        DataError,
        match=r"digits differs in kind .*: values are 0 to 1, were 0 to 255; convert it",
    ):
        hvtrain.train(hvtrain.compose(words))
    assert hvtrain.train(hvtrain.compose([*words, "guard.data=false"])).num_steps == 4
