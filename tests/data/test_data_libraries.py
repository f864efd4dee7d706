"""Data sets that Hugging Face's datasets and tensorflow_datasets left on disk."""

import importlib.util
import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.sources.huggingface import HuggingFace
from hvtrain.data.sources.tfds import PreparedDataset
from hvtrain.errors import ConfigError, DataError
from hvtrain.tasks import Classification, Regression
from hvtrain.training import saved_model

NUM_TRAIN, NUM_TEST = 23, 7
SHAPE = (6, 6, 3)
LABELS = ["ash", "elm", "oak"]
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec(name) is None,
        reason=f"{name} is not installed (scripts/lock/data.txt)",
    )
    for name in ("datasets", "tensorflow_datasets")
]


def pictures(number, seed):
    return np.random.default_rng(seed).integers(0, 256, (number, *SHAPE), np.uint8)


def labels(number):
    return np.arange(number) % 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A DatasetDict of images, and of numbers and lists beside them."""
    import datasets

    folder = tmp_path_factory.mktemp("huggingface") / "leaves"
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=LABELS),
            "sides": datasets.Sequence(datasets.Value("float64"), length=2),
            "grid": datasets.Array2D((2, 3), "float32"),
            "size": datasets.Value("float64"),
        }
    )

    def split(number, seed):
        images = pictures(number, seed)
        return datasets.Dataset.from_dict(
            {
                "image": [Image.fromarray(image) for image in images],
                "label": labels(number),
                "sides": [[row, 2.0 * row] for row in range(number)],
                "grid": [np.full((2, 3), row) for row in range(number)],
                "size": [float(row) for row in range(number)],
            },
            features=features,
        )

    datasets.DatasetDict({"train": split(NUM_TRAIN, 0), "test": split(NUM_TEST, 1)}).save_to_disk(
        str(folder)
    )
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder in which tensorflow_datasets prepared a data set `leaves`, whose files have three shards."""
    import tensorflow_datasets as tfds

    class Leaves(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=SHAPE, encoding_format="png"),
                    "label": tfds.features.ClassLabel(names=LABELS),
                    "size": np.float32,
                }
            )
            return tfds.core.DatasetInfo(
                builder=self, features=features, supervised_keys=("image", "label")
            )

        def _split_generators(self, manager):
            return {"train": self._examples(NUM_TRAIN, 0), "test": self._examples(NUM_TEST, 1)}

        def _generate_examples(self):
            return ()

        def _examples(self, number, seed):
            for row, (image, label) in enumerate(zip(pictures(number, seed), labels(number))):
                yield row, {"image": image, "label": LABELS[label], "size": float(row)}

    folder = tmp_path_factory.mktemp("tfds")
    Leaves(data_dir=str(folder)).download_and_prepare(
        download_config=tfds.download.DownloadConfig(num_shards=3, try_download_gcs=False)
    )
    return folder


@pytest.fixture(params=["huggingface", "tfds"])
def source(request, saved, prepared):
    if request.param == "tfds":
        return PreparedDataset("leaves", str(prepared), image_shape=SHAPE, shuffle_buffer=8)
    return HuggingFace(str(saved), "image", "label", image_shape=SHAPE)


def epoch(source, rank, size, start=0, number=None, steps=None, seed=1):
    """Examples of some steps of one, as bytes of the image and the label."""
    steps = steps or source.shard_sizes("train", size)[rank]
    stream = source.training(StreamRequest(Topology(rank, size), 1, seed, start, steps)).take(
        number or steps
    )
    return [(image.tobytes(), int(label[0])) for image, label in stream.as_numpy_iterator()]


def all_of(number, seed):
    images = pictures(number, seed).astype(np.float32) / np.float32(255)
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels(number)))


def test_shards_are_disjoint_and_complete_with_their_labels(source):
    Classification().prepare(source)
    assert source.facts()["class_names"] == LABELS and source.num_classes == 3
    shards = [epoch(source, rank, 3) for rank in range(3)]
    assert sorted(one for shard in shards for one in shard) == all_of(NUM_TRAIN, 0)
    found = [
        source.evaluation("test", Topology(rank, 3), 2).as_numpy_iterator() for rank in range(3)
    ]
    tested = [
        (image.tobytes(), int(y)) for stream in found for x, ys in stream for image, y in zip(x, ys)
    ]
    assert sorted(tested) == all_of(NUM_TEST, 1)
    assert source.num_examples("validation") == 0
    assert list(source.evaluation("validation", Topology(), 2)) == []


def test_epochs_differ_and_a_stream_goes_on_in_the_middle_of_one(source):
    whole = epoch(source, 1, 2, number=22, steps=11)
    assert sorted(whole[:11]) == sorted(whole[11:]) and whole[:11] != whole[11:]
    assert epoch(source, 1, 2, start=15, number=7, steps=11) == whole[15:]
    assert epoch(source, 1, 2, number=11, steps=11, seed=2) != whole[:11]


def test_the_saved_model_takes_pictures_and_sees_what_streams_give(source):
    assert saved_model.check_preprocessing(source.preprocessing(), source, Topology()) is None
    layers = source.preprocessing()
    ((images, _),) = source.evaluation("test", Topology(), NUM_TEST).as_numpy_iterator()
    raw = sorted(pictures(NUM_TEST, 1).astype(np.float32), key=lambda one: one.tobytes())
    given = sorted(images, key=lambda one: (one * 255).tobytes())
    np.testing.assert_allclose(
        np.sort([float(np.sum(layers(tf.constant(one[None])))) for one in raw]),
        np.sort([float(one.sum()) for one in given]),
        rtol=1e-6,
    )


def test_layers_of_augmentation_get_pixels_of_the_range_that_they_are_told(source):
    source.raw_batches = True  # As with augment=.
    images, _ = next(iter(source.training(StreamRequest(Topology(), NUM_TRAIN, 1, 0, 1))))
    low, high = source.value_range()
    assert low == 0 and high / 2 < images.numpy().max() <= high


def test_a_manifest_tells_files_apart(source):
    found = source.manifest()["splits"]
    assert [found[split]["examples"] for split in ("train", "test")] == [NUM_TRAIN, NUM_TEST]
    assert all(part["num_files"] >= 1 and part["digest"] for part in found.values())


def test_columns_of_numbers_and_lists_by_name(saved):
    source = HuggingFace(str(saved), ["sides", "grid"], "size")
    Regression().prepare(source)
    assert {name: tuple(one.shape) for name, one in source.element_spec[0].items()} == {
        "sides": (2,),
        "grid": (2, 3),
    }
    ((inputs, sizes),) = source.evaluation("test", Topology(1, 2), 10).as_numpy_iterator()
    assert sizes.tolist() == [1, 3, 5] and sizes.dtype == np.float32
    np.testing.assert_array_equal(inputs["sides"], [[1, 2], [3, 6], [5, 10]])
    assert inputs["grid"].tolist() == [[[row] * 3] * 2 for row in (1, 3, 5)]


def test_unlike_rows_and_gaps_are_named(tmp_path):
    import datasets

    rows = {
        "short": [[1.0, 2.0]] * 4 + [[1.0]],
        "gap": [1.0, 2.0, None, 4.0, 5.0],
        "list": [[1.0], [2.0], [3.0], None, [5.0]],
        "inner": [[1.0], [2.0], [None], [4.0], [5.0]],
        "size": [1.0] * 5,
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "rows"))
    said = {
        "short": "row 4 has a list of length 1 (row 0 of train: 2) in short",
        "gap": "row 2 has no value in gap",
        "list": "row 3 has no value in list",
        "inner": "row 2 has no value in inner",
    }
    for column, message in said.items():
        source = HuggingFace(str(tmp_path / "rows"), column, "size")
        with pytest.raises(tf.errors.OpError) as caught:
            list(source.evaluation("train", Topology(), 5))
        assert message in str(source.explain(caught.value)) and isinstance(
            source.explain(caught.value), DataError
        )
    images = datasets.Dataset.from_dict(
        {"image": [Image.fromarray(pictures(1, 0)[0]), None], "size": [1.0] * 2},
        features=datasets.Features({"image": datasets.Image(), "size": datasets.Value("float64")}),
    )
    images.save_to_disk(str(tmp_path / "images"))
    with pytest.raises(DataError, match="train: row 1 has no value in image"):
        HuggingFace(str(tmp_path / "images"), "image", "size", SHAPE).description()
    first = datasets.Dataset.from_dict({"short": [None, [1.0]], "size": [1.0] * 2})
    first.save_to_disk(str(tmp_path / "first"))
    with pytest.raises(DataError, match="train: row 0 has no value in short"):
        HuggingFace(str(tmp_path / "first"), "short", "size")


def test_wrong_settings_of_huggingface_are_refused(saved, tmp_path):
    with pytest.raises(
        DataError, match=r"^dataset.dir=.*nowhere does not exist on \S+; give a folder"
    ):
        HuggingFace(str(tmp_path / "nowhere"), "image", "label")
    with pytest.raises(ConfigError, match=r"name leaf, but .* has image, label, sides, grid, size"):
        HuggingFace(str(saved), "leaf", "label")
    with pytest.raises(ConfigError, match=r"holds images in image; give dataset.image_shape"):
        HuggingFace(str(saved), "image", "label")


def test_splits_and_columns_that_would_be_misread_are_refused(tmp_path):
    import datasets

    def split(names, labels=(0, 1)):
        features = datasets.Features({"label": datasets.ClassLabel(names=names)})
        return datasets.Dataset.from_dict({"label": list(labels)}, features=features).add_column(
            "x", [{"en": "a"}, {"en": "b"}]
        )

    names = ["ash", "elm"]
    datasets.DatasetDict(train=split(names), test=split(names, (-1, -1))).save_to_disk(
        str(tmp_path / "withheld")
    )
    source = HuggingFace(str(tmp_path / "withheld"), "label", "label")
    assert source.num_examples("test") == 0
    assert "test has no labels (label is -1) and is left out" in source.description()["warnings"]

    datasets.DatasetDict(train=split(["ash", "elm"]), test=split(["elm", "ash"])).save_to_disk(
        str(tmp_path / "splits")
    )
    with pytest.raises(
        DataError, match=r"label has other classes in test than in train; cast test to train's"
    ):
        HuggingFace(str(tmp_path / "splits"), "x", "label")
    split(["ash", "elm"]).save_to_disk(str(tmp_path / "dicts"))
    with pytest.raises(DataError, match=r"x holds struct<en: .*>; numbers, strings or images are"):
        HuggingFace(str(tmp_path / "dicts"), "x", "label")


def test_splits_of_tfds_can_be_cut(prepared):
    splits = {"train": "train[:80%]", "validation": "train[80%:]"}
    source = PreparedDataset("leaves", str(prepared), splits=splits, image_shape=SHAPE)
    assert [source.num_examples(split) for split in source.SPLITS] == [18, 5, 0]
    assert source.image_shape == tuple(SHAPE), "or predict would take no images"
    source = PreparedDataset("leaves:1.0.0", str(prepared), input="size", target="size")
    assert [tuple(one.shape) for one in source.element_spec] == [(), ()]


def test_wrong_settings_of_tfds_are_refused(prepared, tmp_path):
    with pytest.raises(
        DataError, match=r"trees cannot be opened .*; prepare it once with tfds.builder\('trees'"
    ):
        PreparedDataset("trees", str(tmp_path))
    with pytest.raises(DataError, match=r"mnist is not prepared in .*; prepare it once"):
        PreparedDataset("mnist", str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"target=label are not both features of leaves; choose from image, label, size",
    ):
        PreparedDataset("leaves", str(prepared), input="leaf")
    with pytest.raises(ConfigError, match=r"leaves holds images; give dataset.image_shape"):
        PreparedDataset("leaves", str(prepared))
    with pytest.raises(
        ConfigError, match=r"dataset.splits names dev; it may name train, validation, test"
    ):
        PreparedDataset("leaves", str(prepared), splits={"dev": "train"}, image_shape=SHAPE)
    source = PreparedDataset("leaves", str(prepared), splits={"train": "leaf"}, image_shape=SHAPE)
    with pytest.raises(
        DataError, match=r"leaves, leaf in 1 shard\(s\): .*; choose other splits or fewer ranks"
    ):
        source.num_examples("train")


@pytest.mark.parametrize(
    ("package", "kind"), [("datasets", HuggingFace), ("tensorflow_datasets", PreparedDataset)]
)
def test_a_missing_library_is_named_with_its_lock(package, kind, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"needs the package .*; install scripts/lock/data.txt"):
        kind(str(tmp_path), "image", "label")
