"""The images of `bench input`: the same JPEG files as a folder, in TFRecord files, and in a Parquet file."""

import io
from pathlib import Path

import numpy as np

TRAINED = (224, 224, 3)
"""Height, width and channels that a model sees."""
NUM_CLASSES = 10
BATCH_SIZE = 32
FORMATS = ("image_folder", "tfrecord", "parquet")
NUM_FILES, GROUP_ROWS, QUALITY = 8, 100, 90
# Cells across an image, and how much they count: from large shapes to fine texture.
TEXTURE = ((4, 0.5), (12, 0.3), (40, 0.2), (112, 0.13))
GRAIN = 5.0  # Standard deviation of each pixel's noise. So a file of 224x224 has 19 KB, about as photographs do.


def jpeg(seed: int, height: int, width: int) -> bytes:
    """A picture of smooth shapes, texture and grain. Pure."""
    from PIL import Image

    random = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    for cells, weight in TEXTURE:
        for channel, field in enumerate(random.random((3, cells, cells), np.float32)):
            smooth = Image.fromarray(field).resize((width, height), Image.Resampling.BICUBIC)
            pixels[..., channel] += weight * np.asarray(smooth)
    grain = random.normal(0, GRAIN, (height, width, 1))
    data = io.BytesIO()
    Image.fromarray((225 * pixels + grain).clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


def write(folder: Path, number: int, height: int, width: int) -> None:
    """Writes so many images to folder/FORMAT for each format."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tensorflow as tf

    images, labels = [jpeg(seed, height, width) for seed in range(number)], [at % NUM_CLASSES for at in range(number)]
    for at, (image, label) in enumerate(zip(images, labels)):
        path = folder / "image_folder" / "train" / f"class_{label}" / f"{at:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    for name in FORMATS[1:]:
        (folder / name).mkdir()
    for file in range(NUM_FILES):
        with tf.io.TFRecordWriter(str(folder / "tfrecord" / f"train-{file}.tfrecord")) as writer:
            for image, label in list(zip(images, labels))[file::NUM_FILES]:
                features = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
    pq.write_table(
        pa.table({"image": images, "label": labels}), folder / "parquet" / "train.parquet", row_group_size=GROUP_ROWS
    )
