"""preprocessing(): from a raw example, as the user holds it, the very bits that the streams give."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data import Source, from_arrays, from_frame
from hvtrain.data.pipeline.decoding import Sizing
from hvtrain.data.pipeline.streams import IndexedSource
from hvtrain.data.pipeline.transform import Transform
from hvtrain.data.sources.arrays import ArraySource
from hvtrain.data.sources.built_in import Synthetic
from hvtrain.data.sources.file_source import decoded_preprocessing
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.data.sources.parquet import Parquet
from hvtrain.data.sources.tfrecord import TFRecords
from hvtrain.errors import ConfigError
from hvtrain.tasks import Classification
from hvtrain.training.saved_model import check_preprocessing, description
from tiny_data import SHAPE, random_images

SIZES = [(6, 6), (11, 4), (23, 31), (3, 3), (6, 13)]


@pytest.fixture(params=["float32", "mixed_bfloat16"])
def precision(request):
    keras.config.set_dtype_policy(request.param)
    yield
    keras.config.set_dtype_policy("float32")


def streamed(source: Source) -> np.ndarray:
    return np.concatenate(
        [images for images, _ in source.evaluation("test", Topology(), 4).as_numpy_iterator()]
    )


def as_model(source: Source) -> keras.Model:
    """The layers as a saved model carries them, after they were saved as text."""
    preprocessing = source.preprocessing()
    raw = preprocessing.inputs()
    return keras.models.model_from_json(keras.Model(raw, preprocessing(raw)).to_json())


def assert_same_bits(source: Source, raw: np.ndarray) -> None:
    expected = streamed(source)
    found = as_model(source).predict(raw, verbose=0)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def pictures() -> list[np.ndarray]:
    """Images of different sizes, as in users' files."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, (*size, 1), np.uint8) for size in SIZES]


@pytest.mark.parametrize("standardize", ["per_pixel", "per_channel", "scale", "none"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((6, 6), "uint8"), ((6, 6, 3), "uint8"), ((5, 7, 3), "float64")]
)
def test_arrays(standardize, shape, dtype, precision):
    rng = np.random.default_rng(0)
    x, x_test = ((rng.normal(90, 20, (count, *shape))).astype(dtype) for count in (40, 9))
    source = from_arrays(
        x, np.arange(40) % 3, x_test, np.arange(9) % 3, standardize=standardize, num_validation=7
    )
    assert source.preprocessing().shape == shape, (
        "before any stream was opened, as in a run that has ended"
    )
    assert_same_bits(source, x_test)
    assert check_preprocessing(source.preprocessing(), source, Topology()) is None


def test_pixels_that_hardly_change_and_tiny_values():
    """Keras's layer divides by 1e-7 at least."""
    rng = np.random.default_rng(0)
    scales = rng.choice([1e-12, 1e-9, 1.0], (4, 4, 1)).astype("float32")
    x = rng.normal(size=(30, 4, 4, 1)).astype("float32") * scales
    assert_same_bits(
        from_arrays(x, np.arange(30) % 3, x[:5], np.arange(5) % 3, standardize="per_pixel"), x[:5]
    )


def test_frames_take_what_a_row_holds():
    images, labels = random_images(12)
    wide = {f"p{number}": images.reshape(12, -1)[:, number] for number in range(36)}

    class Frame(dict):
        columns = property(dict.keys)

        def __getitem__(self, name):
            return pa.array(dict.__getitem__(self, name))

    table = Frame(wide, label=labels)
    source = from_frame(table, table, image_shape=SHAPE, image_column=list(wide))
    assert_same_bits(source, images.reshape(12, 36))
    lists = pa.table({"image": images.reshape(12, -1).tolist(), "label": labels})
    assert_same_bits(from_frame(lists, lists, image_shape=SHAPE), images.reshape(12, 36))


def test_files_of_any_size(tmp_path, precision):
    """Image folders, TFRecords and Parquet: the saved model takes decoded pixels and resizes them itself."""
    encoded = [tf.io.encode_png(image).numpy() for image in pictures()]
    labels = np.arange(len(encoded)) % 2
    for number, data in enumerate(encoded):
        for split in ("train", "test"):
            path = tmp_path / "folder" / split / "only" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for split in ("train", "test"):
        with tf.io.TFRecordWriter(str(tmp_path / f"{split}.tfrecord")) as writer:
            for data, label in zip(encoded, labels):
                features = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[data])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                writer.write(
                    tf.train.Example(
                        features=tf.train.Features(feature=features)
                    ).SerializeToString()
                )
        pq.write_table(pa.table({"image": encoded, "label": labels}), tmp_path / f"{split}.parquet")
    sources = [
        ImageFolder(str(tmp_path / "folder"), SHAPE),
        TFRecords(str(tmp_path), SHAPE, 2),
        Parquet(str(tmp_path), SHAPE, 2),
    ]
    for source in sources:
        model, expected = as_model(source), streamed(source)
        found = [model.predict(image[np.newaxis], verbose=0)[0] for image in pictures()]
        np.testing.assert_array_equal(np.stack(found), expected, err_msg=source.name)
        assert check_preprocessing(source.preprocessing(), source, Topology()) is None


def test_a_model_behind_it_trains_only_when_it_is_told_to():
    """keras.layers.Resizing would turn training on in a plain call."""
    raw = keras.Input((None, None, 1))
    normalization = keras.layers.BatchNormalization()
    preprocessing = decoded_preprocessing(Transform(scale=255.0), Sizing(SHAPE))
    model = keras.Model(raw, normalization(preprocessing(raw)))
    images = np.random.default_rng(0).uniform(0, 255, (4, 9, 8, 1)).astype("float32")
    np.testing.assert_array_equal(model(images), model(images, training=False))
    assert not normalization.moving_mean.numpy().any()


def test_parquet_of_pixels(tmp_path):
    images, labels = random_images(9)
    for split in ("train", "test"):
        table = pa.table({"image": images.reshape(9, -1).tolist(), "label": labels})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    assert_same_bits(Parquet(str(tmp_path), SHAPE, 3), images.reshape(9, -1))


def test_noise_is_taken_as_it_is():
    source = Synthetic(SHAPE, 3, num_train=8, num_test=8)
    assert source.preprocessing().layers == ()
    assert_same_bits(source, streamed(source))


class Own(IndexedSource):
    """A user's own, which declares nothing."""

    name, origin, image_shape, num_classes = "own", "here", (2, 2, 1), 3
    factor = 1.0

    def num_examples(self, split):
        return 6

    def reader(self, split, topology):
        images = tf.reshape(tf.range(24, dtype=tf.float32), [6, 2, 2, 1])
        return lambda indices: (tf.gather(images, indices), tf.zeros_like(indices, tf.int32))

    def load(self, steps, split, topology, then, batch_size=None):
        found = super().load(steps, split, topology, then, batch_size)
        return found.map(lambda images, labels: (images * self.factor, labels))


def test_a_source_of_ones_own_inherits_its_transform():
    plain = Own()
    assert plain.preprocessing().layers == []
    assert check_preprocessing(plain.preprocessing(), plain, Topology()) is None
    scaled = Own()
    scaled.transform = Transform(mean=np.array([3.0]), scale=7.0)
    assert len(scaled.preprocessing().layers) == 1
    assert check_preprocessing(scaled.preprocessing(), scaled, Topology()) is None


def test_a_stream_that_does_more_than_was_declared_is_named():
    source = Own()
    source.factor = 0.5
    found = check_preprocessing(source.preprocessing(), source, Topology())
    assert found is not None
    assert found.startswith(
        "example 0 (test) differs by 1.5 between preprocessing() of own and its stream; "
    )


def test_the_description_names_classes_and_input():
    images, labels = random_images(12)
    source = from_arrays(images, labels, class_names=["ash", "elm", "oak"])
    found = description(source, Classification(), source.preprocessing())
    assert found["class_names"] == ["ash", "elm", "oak"] and found["num_classes"] == 3
    assert found["input"]["shape"] == SHAPE
    assert found["input"]["range"] == (images.min(), images.max())
    with pytest.raises(ConfigError, match="class_names has length 2, but num_classes is 3; give"):
        ArraySource("trees", dict, SHAPE, 3, class_names=["ash", "elm"])


def test_a_scale_of_zero_is_refused():
    with pytest.raises(ConfigError, match=r"scale=0 cannot divide pixels; give numbers above 0"):
        Transform(scale=0)


@pytest.mark.parametrize("standardize", ["per_pixel", "per_channel", "scale", "none"])
def test_what_was_fitted_is_kept_bit_for_bit_on_other_data(standardize):
    def source(factor):
        images, labels = random_images(20, 0)
        return from_arrays(images * factor, labels, images, labels, standardize=standardize)

    first, later = source(1), source(0.5)
    later.fit_as(first.fitted())
    assert np.array_equal(streamed(later), streamed(first))
    assert later.fitted() == first.fitted() and later.value_range() == first.value_range()
