"""ImageNet as people have it, the published recipe in steps and rates, and a made set that it learns on 2 ranks."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io
import tensorflow as tf
from PIL import Image

from hvtrain.config.compose import compose
from hvtrain.config.instantiate import build
from hvtrain.config.make_plan import make_plan
from hvtrain.config.schema import from_dict
from hvtrain.core.schedule import Schedule
from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.data.sources.parquet import Parquet
from hvtrain.data.sources.tfrecord import TFRecords
from hvtrain.errors import DataError
from launching import train
from pages import PAGES, files

TRAINING_IMAGES = 1_281_167
# 20 classes: a color, in a pattern.
COLORS = np.array([[220, 40, 40], [40, 200, 40], [50, 50, 220], [220, 220, 40], [210, 50, 210]])
PATTERNS = [
    lambda rows, columns: rows % 2 == 0,
    lambda rows, columns: columns % 2 == 0,
    lambda rows, columns: (rows + columns) % 2 == 0,
    lambda rows, columns: rows + columns >= 0,
]
# As WordNet's, which name ImageNet's folders: not in the order of colors and shapes.
SYNSETS = [f"n{number * 7919 % 10007:08d}" for number in range(1, 21)]
SIDE = 8


def picture(number, rng):
    """A JPEG of class `number`, of any size, with a pattern on noise."""
    height, width = (int(side) for side in rng.integers(40, 160, 2))
    pixels = rng.integers(70, 130, (height, width, 1)).repeat(3, axis=2)
    tile = min(height, width) / rng.uniform(4, 6)
    rows, columns = (np.indices((height, width)) // tile).astype(int)
    pixels[PATTERNS[number // 5](rows, columns)] = COLORS[number % 5]
    image = Image.fromarray(pixels.astype(np.uint8))
    file = io.BytesIO()
    # Some of ImageNet's JPEGs are CMYK, and one is a PNG.
    kind = rng.random()
    if kind < 0.02:
        image = image.convert("CMYK")
    image.save(file, "PNG" if kind > 0.98 else "JPEG")
    return file.getvalue()


def write_split(folder, count, seed, flat=False):
    """Writes count images, in a folder for each class or all in one; returns the flat names' classes."""
    rng = np.random.default_rng(seed)
    classes = rng.permutation(np.arange(count) % len(SYNSETS))
    for index, number in enumerate(classes, start=1):
        synset = SYNSETS[number]
        name = f"ILSVRC2012_val_{index:08d}.JPEG" if flat else f"{synset}/{synset}_{index}.JPEG"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, rng))
    return [SYNSETS[number] for number in classes]


# Ranks, steps of an epoch, the first rate and the peak: of the paper's runs with 256, 2,048 and 8,192 images a step.
PAPER = [(8, 5004, 0.1, 0.1), (64, 625, 0.1, 0.8), (256, 156, 0.1, 3.2)]


@pytest.mark.parametrize(("ranks", "epoch", "first", "peak"), PAPER)
@pytest.mark.parametrize("name", ["imagenet_resnet50", "imagenet_resnet50_fast"])
def test_steps_and_rates_are_those_of_the_paper(name, ranks, epoch, first, peak):
    config = from_dict(
        compose([f"experiment={name}", "dataset.dir=imagenet", "train.batch_size=32"])
    )
    rate = config.optimizer["learning_rate"] if name == "imagenet_resnet50" else 0.0125
    shards = [len(Topology(rank, ranks).share(TRAINING_IMAGES)) for rank in range(ranks)]
    plan = make_plan(config.train, rate, shards, "imagenet")
    assert (plan.global_batch, plan.steps_per_epoch, plan.num_epochs) == (32 * ranks, epoch, 90)
    assert (
        plan.peak_learning_rate
        == pytest.approx(peak)
        == pytest.approx(0.1 * plan.global_batch / 256)
    )
    schedule = build(
        config,
        "schedule",
        Schedule,
        base=plan.base_learning_rate,
        peak=plan.peak_learning_rate,
        steps_per_epoch=plan.steps_per_epoch,
        num_steps=plan.num_steps,
    )
    assert schedule(0) == pytest.approx(first)
    # By the same amount in each step, to the peak at the end of epoch 5.
    assert schedule(1) - schedule(0) == pytest.approx((peak - first) / (5 * epoch))
    assert schedule(5 * epoch) == pytest.approx(peak)
    if name == "imagenet_resnet50":
        at = {
            step: schedule(step) / peak
            for fall in (30, 60, 80)
            for step in (fall * epoch - 1, fall * epoch)
        }
        assert list(at.values()) == pytest.approx([1, 0.1, 0.1, 0.01, 0.01, 0.001])
        assert schedule(90 * epoch - 1) == pytest.approx(peak / 1000)
    else:
        assert schedule(round(47.5 * epoch)) == pytest.approx(peak / 2, rel=1e-2), (
            "half of the cosine"
        )


def test_the_fast_recipe_has_the_same_rate_for_the_same_global_batch():
    config = from_dict(compose(["experiment=imagenet_resnet50_fast", "dataset.dir=imagenet"]))
    assert config.optimizer["learning_rate"] / config.train.batch_size == pytest.approx(0.1 / 256)


@pytest.fixture(scope="module")
def challenge(tmp_path_factory):
    """The folders of the challenge, with five ways in which people have the classes of the flat validation."""
    folder = tmp_path_factory.mktemp("imagenet")
    write_split(folder / "train", 40, 0)
    synsets = write_split(folder / "validation", 30, 1, flat=True)
    names = [path.name for path in sorted((folder / "validation").iterdir())]
    # Of the development kit, whose numbers are not in the order of the names.
    numbers = [SYNSETS.index(synset) + 1 for synset in synsets]
    entries = {"WNID": SYNSETS, "ILSVRC2012_ID": range(1, 21), "gloss": ["some words"] * 20}
    rows = np.array(
        list(zip(*entries.values())), [("WNID", "O"), ("ILSVRC2012_ID", "O"), ("gloss", "O")]
    )
    scipy.io.savemat(folder / "meta.mat", {"synsets": rows})
    kaggle = [
        f"{name.removesuffix('.JPEG')},{synset} 10 20 30 40" for name, synset in zip(names, synsets)
    ]
    in_order = sorted(SYNSETS)
    texts = {
        "synset_labels.txt": synsets,
        "ILSVRC2012_validation_ground_truth.txt": map(str, numbers),
        "LOC_val_solution.csv": ["ImageId,PredictionString", *reversed(kaggle)],
        "val.txt": [f"val/{name} {in_order.index(synset)}" for name, synset in zip(names, synsets)],
        "from_0.txt": [f"{number} {synset} a gloss" for number, synset in enumerate(in_order)],
    }
    for name, lines in texts.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder, synsets


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        ("synset_labels.txt", None),
        ("LOC_val_solution.csv", None),
        ("ILSVRC2012_validation_ground_truth.txt", "numbers.txt"),
        ("val.txt", "from_0.txt"),
    ],
)
def test_a_flat_validation_gets_its_classes_from_a_file(challenge, labels, numbers, monkeypatch):
    folder, synsets = challenge
    monkeypatch.chdir(folder)
    exec(files(PAGES["imagenet"])["number_synsets.py"])  # Writes numbers.txt.
    settings = {
        "labels": str(folder / labels),
        "class_numbers": str(folder / numbers) if numbers else None,
    }
    source = ImageFolder(str(folder), (SIDE, SIDE, 3), **settings)
    assert source.class_names == sorted(SYNSETS)
    assert [source.class_names[label] for label in source.whole_targets()["validation"]] == synsets
    (batch,) = source.evaluation("validation", Topology(), 30).as_numpy_iterator()
    assert batch[0].shape == (30, SIDE, SIDE, 3)


def test_a_flat_validation_without_its_classes_is_refused(challenge, tmp_path):
    folder, _ = challenge

    def refused(labels, message):
        with pytest.raises(DataError, match=message):
            ImageFolder(str(folder), (SIDE, SIDE, 3), labels=labels)

    refused(
        None,
        r"validation holds no class folders; files are needed as .*in the file dataset.labels \(docs/imagenet",
    )
    truth = folder / "ILSVRC2012_validation_ground_truth.txt"
    refused(
        str(truth),
        r"gives 30 image\(s\) a class that has no folder in train/: ILSVRC2012_val_00000001.JPEG \(\d+\), .*class_num",
    )
    short = tmp_path / "short.txt"
    short.write_text("n1\n")
    refused(str(short), r"short.txt \(1\) is not the number of images \(30\); give one line")
    short.write_text(f"ILSVRC2012_val_00000001.JPEG {SYNSETS[0]}\n")
    refused(
        str(short),
        r"gives 29 image\(s\) a class that has no folder in train/: ILSVRC2012_val_00000002.JPEG \(no class\)",
    )


def example(image, label):
    """As TensorFlow's build_imagenet_data.py writes it: labels from 1, since 0 is the background."""
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        "image/class/synset": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"n01440764"])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def labels_of(source, count):
    images, labels = next(
        source.training(StreamRequest(Topology(), count, 1, 0, 1)).as_numpy_iterator()
    )
    assert images.shape == (count, SIDE, SIDE, 3)
    return sorted(labels.tolist())


def test_records_of_tensorflow_with_labels_from_1(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / f"train-{number:05d}-of-00002")) as writer:
            for label in range(1 + 10 * number, 11 + 10 * number):
                writer.write(example(picture(label - 1, rng), label))

    def opened(**settings):
        keys = {"image_key": "image/encoded", "label_key": "image/class/label"}
        return TFRecords(str(tmp_path), (SIDE, SIDE, 3), 20, **keys, **settings)

    assert labels_of(opened(first_label=1), 20) == list(range(20))
    source = opened()
    with pytest.raises(tf.errors.OpError) as caught:
        labels_of(source, 20)
    message = str(source.explain(caught.value))
    assert (
        "label 20 is outside 0 ... 19; if labels begin at 1, set dataset.first_label=1; " in message
    )


def test_parquet_of_hugging_face(tmp_path):
    rng = np.random.default_rng(0)
    images = [{"bytes": picture(number, rng), "path": f"{number}.JPEG"} for number in range(20)]
    table = pa.table({"image": images, "label": list(range(20))})
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "train-00000-of-00001.parquet")
    source = Parquet(str(tmp_path / "data"), (SIDE, SIDE, 3), 20, image_column="image.bytes")
    assert labels_of(source, 20) == list(range(20))


@pytest.mark.distributed
def test_the_recipe_learns_a_made_imagenet_on_two_ranks(tmp_path):
    data = tmp_path / "data"
    write_split(data / "train", 1000, 0)
    write_split(data / "test", 200, 2)
    (tmp_path / "labels.txt").write_text(
        "\n".join(write_split(data / "validation", 100, 1, flat=True))
    )
    # Smaller, and shorter; the crops, the decay and the kind of warm-up and steps stay the recipe's.
    settings = [
        "experiment=imagenet_resnet50",
        "dataset.dir=data",
        "dataset.labels=labels.txt",
        "dataset.image_shape=[32,32,3]",
        "model=resnet20",
        "model.blocks_per_stage=1",
        "train.epochs=5",
        "schedule.warmup_epochs=1",
        "schedule.at_epochs=[3,4]",
        "optimizer.learning_rate=0.05",
        "run.dir=run",
    ]
    code, output = train("mpi", 2, *settings, cwd=tmp_path)
    assert code == 0, output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["metrics"]["test_accuracy"] >= 0.95, output
