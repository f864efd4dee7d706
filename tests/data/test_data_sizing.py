"""How images become one size: pixels against NumPy and Pillow, random crops, and the saved model's side of it."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from PIL import Image

from hvtrain.config.make_plan import make_plan
from hvtrain.config.schema import TrainConfig
from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.pipeline.decoding import FITS, RESIZES, RandomResizedCrop, Sizing, decode_batch
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.data.sources.parquet import Parquet
from hvtrain.data.sources.segmentation_folder import SegmentationFolder
from hvtrain.data.sources.tfrecord import TFRecords
from hvtrain.errors import ConfigError
from hvtrain.training.run import training_batches
from hvtrain.training.saved_model import check_preprocessing
from tiers import mostly_nightly

SHAPE = (24, 32, 3)
SIZES = [(61, 90), (90, 61), (33, 200), (24, 32), (15, 20)]


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A picture with large shapes and fine texture."""
    random = np.random.default_rng(seed)
    rough = Image.fromarray(random.integers(0, 256, (4, 5, 3), np.uint8)).resize((width, height))
    return np.clip(np.asarray(rough) + random.normal(0, 12, (height, width, 1)), 0, 255).astype(
        np.uint8
    )


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, kind)
    return data.getvalue()


def decoder(sizing: Sizing):
    """Decodes one image in a graph, in which no image is a constant."""
    graph = tf.function(lambda images, *draws: decode_batch(images, sizing, *draws)[0])
    return lambda image, *draws: graph(tf.constant([image]), *(draw[None] for draw in draws))


def bilinear(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes between the four nearest pixels, whose centers lie at one half."""
    for axis, size in enumerate((height, width)):
        number = pixels.shape[axis]
        positions = ((np.arange(size) + 0.5) * number / size - 0.5).clip(0, number - 1)
        low = np.floor(positions).astype(int)
        high = np.minimum(low + 1, number - 1)
        parts = (positions - low).reshape([-1 if number == axis else 1 for number in range(3)])
        pixels = np.take(pixels, low, axis) * (1 - parts) + np.take(pixels, high, axis) * parts
    return pixels


def central(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    top = (pixels.shape[0] - height) // 2
    left = (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def by_numpy(pixels: np.ndarray, fit: str, crop_fraction: float) -> np.ndarray:
    height, width = (side + 2 * round((side / crop_fraction - side) / 2) for side in SHAPE[:2])
    rows, columns, _ = pixels.shape
    if fit == "crop":
        pixels = central(
            pixels, min(rows, columns * height // width), min(columns, rows * width // height)
        )
    if fit == "pad":
        above = max(0, columns * height // width - rows) // 2
        before = max(0, rows * width // height - columns) // 2
        pixels = np.pad(pixels, ((above, above), (before, before), (0, 0)))
    return central(bilinear(pixels, height, width), *SHAPE[:2])


@pytest.mark.parametrize("crop_fraction", [1.0, 0.75])
@pytest.mark.parametrize("fit", FITS)
def test_pixels_are_those_of_the_same_arithmetic_in_numpy(fit, crop_fraction):
    decoded = decoder(Sizing(SHAPE, fit=fit, crop_fraction=crop_fraction))
    for size in SIZES:
        pixels = picture(*size)
        gap = np.abs(decoded(encoded(pixels)).numpy() - by_numpy(pixels, fit, crop_fraction))
        assert gap.max() <= 0.51, (size, "rounded to whole grey levels")


@pytest.mark.parametrize("crop_fraction", [1.0, 0.75])
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("resize", RESIZES)
def test_the_saved_model_gives_the_bits_of_validation(resize, fit, crop_fraction):
    """Also of a JPEG, of which validation decodes only a part."""
    sizing = Sizing(SHAPE, resize, fit, crop_fraction)
    decoded = decoder(sizing)
    for size in SIZES:
        jpeg = encoded(picture(*size), "JPEG")
        whole = tf.io.decode_jpeg(jpeg).numpy()
        validated = decoded(jpeg).numpy()
        assert np.array_equal(validated, decoded(encoded(whole)).numpy()), (
            "the same pixels as a PNG"
        )
        raw = tf.cast(sizing.decode_for_model(jpeg), tf.float32)[tf.newaxis]
        for layer in sizing.layers():
            raw = layer(raw)
        assert np.array_equal(raw[0], validated)
        if size == SHAPE[:2] and crop_fraction == 1:
            assert np.array_equal(validated, whole), "an image of the right size is left as it is"


def test_antialiased_images_are_those_of_pillow():
    pixels = picture(120, 160)
    expected = np.asarray(Image.fromarray(pixels).resize((32, 24), Image.Resampling.BILINEAR), int)
    found = {
        resize: decoder(Sizing(SHAPE, resize))(encoded(pixels)).numpy().astype(int)
        for resize in RESIZES
    }
    gaps = {resize: np.abs(image - expected).mean() for resize, image in found.items()}
    assert gaps["antialias"] < 0.5 < gaps["area"] < gaps["bilinear"]


WIDE = RandomResizedCrop()


def test_a_random_crop_is_that_part_of_the_image_resized():
    sizing = Sizing(SHAPE, crop=WIDE)
    decoded = decoder(sizing)
    jpeg = encoded(picture(150, 201), "JPEG")
    whole = tf.io.decode_jpeg(jpeg).numpy()
    crops = set()
    for draws in WIDE.draw(12, tf.constant([3, 4], tf.int64)):
        top, left, height, width = map(int, WIDE.windows(tf.constant([[150, 201]]), draws[None])[0])
        crops.add((top, left, height, width))
        expected = bilinear(
            whole[top : top + height, left : left + width].astype(float), *SHAPE[:2]
        )
        assert np.abs(decoded(encoded(whole), draws).numpy() - expected).max() <= 0.51
        gap = np.abs(decoded(jpeg, draws).numpy() - expected)
        assert gap.max() < 16 and gap[:, 4:-4].max() <= 0.51, "but for the colours of outer columns"
    assert len(crops) == 12


def test_a_large_jpeg_is_decoded_at_a_fraction_where_it_is_averaged_anyway():
    """At an eighth the place is rounded to 8 of the 25 pixels that become one: less than one pixel's difference."""
    pixels = picture(600, 800)
    jpeg = encoded(pixels, "JPEG")
    crop = RandomResizedCrop((0.9, 1.0), (1.3, 1.34))
    decoded = decoder(Sizing(SHAPE, "antialias", crop=crop))
    for draws in crop.draw(3, tf.constant([1, 1], tf.int64)):
        top, left, height, width = map(int, crop.windows(tf.constant([[600, 800]]), draws[None])[0])
        part = Image.open(io.BytesIO(jpeg)).crop((left, top, left + width, top + height))
        expected = np.asarray(part.resize((32, 24), Image.Resampling.BILINEAR), int)
        found = decoded(jpeg, draws).numpy().astype(int)
        assert (
            np.abs(found - expected).mean()
            < 6
            < np.abs(np.roll(found, 1, axis=1) - expected).mean() / 2
        )
        assert not np.array_equal(
            found, decoded(encoded(tf.io.decode_jpeg(jpeg).numpy()), draws)
        ), "a fraction"


def test_areas_and_aspects_are_distributed_as_in_the_paper():
    draws = WIDE.draw(4000, tf.constant([1, 2], tf.int64)).numpy()
    height, width = draws[..., 0], draws[..., 1]
    quantiles = np.linspace(0.05, 0.95, 19)
    np.testing.assert_allclose(
        np.quantile(height * width, quantiles), 0.08 + 0.92 * quantiles, atol=0.01
    )
    logarithms = np.log(3 / 4) + quantiles * np.log(16 / 9)
    np.testing.assert_allclose(
        np.quantile(np.log(width / height), quantiles), logarithms, atol=0.01
    )
    np.testing.assert_allclose(np.quantile(draws[..., 2:], quantiles), quantiles, atol=0.01)

    for size in ((375, 500), (500, 375), (1000, 40), (3, 2)):
        windows = WIDE.windows(tf.constant([size] * 200), tf.constant(draws[:200])).numpy()
        assert (windows[:, :2] >= 0).all() and (windows[:, 2:] >= 1).all()
        assert (windows[:, :2] + windows[:, 2:] <= size).all(), "inside the image"
        aspects = windows[:, 3] / windows[:, 2]
        if min(size) > 100:
            assert aspects.min() > 0.73 and aspects.max() < 1.37
            assert len(np.unique(windows, axis=0)) > 30
        if size == (1000, 40):
            assert set(windows[:, 3]) == {40}, "none fits, so the first is cut to the image"


def make(kind: str, folder, **options):
    """Twelve pictures of several sizes, as a source of a kind that crops at random."""
    images = [encoded(picture(50 + 3 * seed, 70, seed), "JPEG") for seed in range(12)]
    labels = np.arange(12) % 3
    if kind == "image_folder":
        for number, (image, label) in enumerate(zip(images, labels)):
            path = folder / "train" / f"class_{label}" / f"{number:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)
        source = ImageFolder(str(folder), SHAPE, flip=False, **options)
    elif kind == "parquet":
        pq.write_table(
            pa.table({"image": images, "label": labels}), folder / "train.parquet", row_group_size=2
        )
        source = Parquet(str(folder), SHAPE, 3, **options)
    else:
        for file in range(4):
            with tf.io.TFRecordWriter(str(folder / f"train-{file}.tfrecord")) as writer:
                for image, label in list(zip(images, labels))[file::4]:
                    features = {
                        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                    }
                    example = tf.train.Example(features=tf.train.Features(feature=features))
                    writer.write(example.SerializeToString())
        source = TFRecords(str(folder), SHAPE, 3, **options)
    source.sizing = Sizing(SHAPE, crop=WIDE)
    return source


def joint(source, plan, start_step: int) -> list[np.ndarray]:
    """The images of all ranks' batches, by step."""
    ranks = [Topology(rank, plan.size) for rank in range(plan.size)]
    streams = [
        training_batches(source, plan, rank, 5, start_step).take(6).as_numpy_iterator()
        for rank in ranks
    ]
    return [np.concatenate([images for images, _ in batches]) for batches in zip(*streams)]


@pytest.mark.parametrize(
    "kind", mostly_nightly(["image_folder", "tfrecord", "parquet"], "image_folder")
)
def test_crops_are_the_same_after_a_resume_and_on_another_number_of_ranks(kind, tmp_path):
    source = make(kind, tmp_path)
    plan = make_plan(TrainConfig(), 0.1, source.shard_sizes("train", 2), "toys", [2, 2])
    whole = joint(source, plan, 0)
    assert len({image.tobytes() for batch in whole for image in batch}) == 24, (
        "crops of an image differ by epoch"
    )
    assert np.array_equal(joint(source, plan, 2)[:4], whole[2:]), (
        "in the middle of an epoch of 3 steps"
    )
    for num_ranks in (1, 3):
        assert np.array_equal(joint(source, plan.on(num_ranks), 0), whole)


def test_the_crops_of_good_images_stay_if_one_of_their_batch_is_left_out(tmp_path):
    source = make("image_folder", tmp_path)
    request = StreamRequest(Topology(), 12, 1, 0, 1)
    before, labels = next(source.training(request).as_numpy_iterator())
    (tmp_path / "train/class_1/04.jpg").write_bytes(b"damaged")
    source.on_error = "skip"
    after, _ = next(source.training(request).as_numpy_iterator())
    same = (before == after).all(axis=(1, 2, 3))
    assert same.sum() == 11 and labels[~same] == 1


def test_evaluation_and_the_saved_model_do_not_crop_at_random(tmp_path):
    source = make("image_folder", tmp_path)
    assert check_preprocessing(source.preprocessing(), source, Topology()) is None
    (images, _), *_ = source.evaluation("train", Topology(), 12).as_numpy_iterator()
    path = source.paths("train")[0]
    expected = by_numpy(tf.io.decode_jpeg(tf.io.read_file(path)).numpy(), "crop", 1.0)
    assert np.abs(images[0] * 255 - expected).max() <= 0.51


def test_masks_follow_their_images(tmp_path):
    """Each pixel of an image tells its label."""
    labels = (
        np.random.default_rng(0)
        .integers(0, 3, (5, 9), np.uint8)
        .repeat(8, axis=0)
        .repeat(8, axis=1)
    )
    for kind, pixels in (("images", np.stack([100 + 50 * labels] * 3, axis=-1)), ("masks", labels)):
        (tmp_path / "train" / kind).mkdir(parents=True)
        (tmp_path / "train" / kind / "a.png").write_bytes(encoded(pixels))
    for fit in FITS:
        for crop_fraction in (1.0, 0.75):
            source = SegmentationFolder(
                str(tmp_path), SHAPE, 3, flip=False, fit=fit, crop_fraction=crop_fraction
            )
            ((image,), (mask,)) = next(
                source.evaluation("train", Topology(), 1).as_numpy_iterator()
            )
            levels = image[..., 0] * 255
            is_padding = levels == 0
            assert (
                is_padding.any() == (fit == "pad" and crop_fraction == 1)
                and (mask[is_padding] == 255).all()
            )
            near = np.abs(levels[..., None] - (100, 150, 200)) < 1
            is_pure = near.any(axis=-1)
            assert is_pure.mean() > 0.15 and np.array_equal(
                mask[is_pure], near.argmax(axis=-1)[is_pure]
            )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resize": "cubic"}, r"dataset.resize=cubic is not one of bilinear, area, antialias"),
        ({"fit": "cut"}, r"dataset.fit=cut is not one of crop, pad, stretch"),
        (
            {"crop_fraction": 1.1},
            r"dataset.crop_fraction=1.1 is out of range; give a number above 0 and at most 1, such as",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Sizing(SHAPE, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"area": [0.5, 1.1]},
        {"aspect": [0, 1]},
        {"area": [0.5, 0.1]},
        {"area": [0.5]},
        {"area": 0.5},
    ],
)
def test_crops_out_of_range_are_refused(settings):
    with pytest.raises(
        ConfigError,
        match=r"augment.random_resized_crop.\w+=\S.* is out of range; give \[smallest",
    ):
        RandomResizedCrop(**settings)
