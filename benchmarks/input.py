"""`benchmarks input`: how fast image files become batches, against Keras's reader and pipelines by hand.

The images are the same in all formats: JPEG files in a folder, in TFRecord files, and in a Parquet
file.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.experiment import Case, Experiment
from benchmarks.processes import WARMUP, Command, python_line, run_and_report, thread_variables
from hvtrain.report.ratios import Ratio, ratio
from hvtrain.system.console import progress

WORKER = "benchmarks.by_hand.input_pipelines"
WARMUP_STEPS = 12
BATCH_SIZE = 32
NUM_CLASSES = 10
TRAINED = (224, 224, 3)  # Height, width and channels that a model sees.
CROP_FRACTION = 0.875  # Of the shorter side: 224 of 256, as ImageNet is validated.
# Of a random crop: shares of the image's area, and width / height (Szegedy et al. 2015, arXiv:1409.4842).
AREAS = (0.08, 1.0)
ASPECTS = (3 / 4, 4 / 3)
# What happens to an image, and hvtrain's settings for it. A pipeline by hand does the same.
WORKS = {
    "resize": ["dataset.fit=stretch", "dataset.resize=bilinear"],
    "antialias": ["dataset.fit=stretch", "dataset.resize=antialias"],
    "random-crop": ["augment=[random_resized_crop]", "dataset.resize=bilinear"],
    "central-crop": [
        f"dataset.crop_fraction={CROP_FRACTION}",
        "dataset.fit=crop",
        "dataset.resize=bilinear",
    ],
}
# A contender only where it can do that work.
KERAS_WORKS = ("resize", "central-crop")
FORMATS = ("image_folder", "tfrecord", "parquet")
NUM_RECORD_FILES = 8
GPU_RATE = 1500  # Images/s that one GPU takes, for the column that says how many cores feed it.
GROUP_ROWS = 100

JPEG_QUALITY = 90
# Cells across an image, and how much they count: from large shapes to fine texture.
TEXTURE = ((4, 0.5), (12, 0.3), (40, 0.2), (112, 0.13))
GRAIN = 5.0  # Standard deviation of each pixel's noise. So a file of 224x224 has 19 KB, about as photographs do.


@dataclass
class Inputs(Experiment):
    """All pipelines on files of several sizes.

    Attributes:
        sizes: Heights and widths of the files. All become TRAINED.
        works: Of WORKS, for files of another size.
        num_images: In each format.
        steps: Timed steps.
    """

    sizes: Sequence[tuple[int, int]]
    works: Sequence[str]
    num_images: int
    steps: int

    name = "input"
    keys = ("size", "work", "format", "contender")
    columns: ClassVar = {
        # First, so in the picture too: it depends less on what else the machine does.
        "CPU ms": ("cpu_ms_per_example", 1.0, ".3f"),
        "examples/s": ("examples_per_second", 1.0, ",.0f"),
        f"cores for {GPU_RATE:,}/s": ("cpu_ms_per_example", GPU_RATE / 1000, ".1f"),
        "peak MB": ("peak_bytes", 1e-6, ",.0f"),
    }

    def cases(self) -> list[Case]:
        cases: list[Case] = []
        for height, width in self.sizes:
            # Files of the trained size are only decoded; the first work stands for all.
            is_trained = (height, width) == TRAINED[:2]
            works = ["resize"] if is_trained else self.works
            for work, file_format in product(works, FORMATS):
                contenders = ["hvtrain", "by-hand"]
                if work == "central-crop":
                    contenders.append("crop-first")
                if file_format == "image_folder" and work in KERAS_WORKS:
                    contenders.append("keras")
                cases += [
                    (f"{height}x{width}", work, file_format, contender) for contender in contenders
                ]

        return cases

    def run(self, num_rounds: int) -> None:
        """Writes the images, and measures all pipelines in turns."""
        for height, width in self.sizes:
            progress(f"writing {self.num_images} images of {height}x{width} ...")
            write_images(self.folder / "data" / f"{height}x{width}", self.num_images, height, width)
        super().run(num_rounds)

    def measure(self, case: Case, folder: Path) -> dict[str, float]:
        size, work, file_format, contender = case
        data = self.folder / "data" / size / file_format
        numbers = (self.threads, WARMUP_STEPS + self.steps)
        arguments = [contender, work, file_format, str(data), *map(str, numbers)]
        variables = {WARMUP: str(WARMUP_STEPS), **thread_variables(self.threads)}
        (report,) = run_and_report(
            WORKER, [Command(python_line(WORKER, arguments))], 1, folder, variables
        )

        return {
            "examples_per_second": BATCH_SIZE / report["step_seconds"],
            "cpu_ms_per_example": 1000 * report["step_cpu_seconds"] / BATCH_SIZE,
            "peak_bytes": report["peak_bytes"],
        }

    def ratios(self, case: Case) -> dict[str, Ratio]:
        # hvtrain does the same work to the same files in the same format.
        ours = (*case[:-1], "hvtrain")
        figures = {"examples/s": "examples_per_second", "CPU time": "cpu_ms_per_example"}
        return {
            f"{title}, hvtrain / it": ratio(self.values(ours, figure), self.values(case, figure))
            for title, figure in figures.items()
        }

    def about(self) -> str:
        height, width, _ = TRAINED
        return (
            f"{self.num_images} JPEG images to {height}x{width} float32, batch {BATCH_SIZE}, {self.threads} "
            f"thread(s), {self.steps} steps"
        )


def jpeg(seed: int, height: int, width: int) -> bytes:
    """A picture of smooth shapes, texture and grain. Pure."""
    from PIL import Image

    random = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)

    for cells, weight in TEXTURE:
        for channel, cell_values in enumerate(random.random((3, cells, cells), np.float32)):
            smooth = Image.fromarray(cell_values).resize((width, height), Image.Resampling.BICUBIC)
            pixels[..., channel] += weight * np.asarray(smooth)

    # Without grain JPEG would make the files far too small.
    grain = random.normal(0, GRAIN, (height, width, 1))
    data = io.BytesIO()
    Image.fromarray((225 * pixels + grain).clip(0, 255).astype(np.uint8)).save(
        data, "JPEG", quality=JPEG_QUALITY
    )
    return data.getvalue()


def write_images(folder: Path, num_images: int, height: int, width: int) -> None:
    """Writes the images to folder/FORMAT for each format."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tensorflow as tf

    # The same bytes in all formats.
    images = [jpeg(seed, height, width) for seed in range(num_images)]
    labels = [number % NUM_CLASSES for number in range(num_images)]

    for number, (image, label) in enumerate(zip(images, labels)):
        path = folder / "image_folder" / "train" / f"class_{label}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)

    (folder / "tfrecord").mkdir()
    # Several files, as hvtrain and tf.data read them in parallel.
    for file_number in range(NUM_RECORD_FILES):
        with tf.io.TFRecordWriter(
            str(folder / "tfrecord" / f"train-{file_number}.tfrecord")
        ) as writer:
            for image, label in list(zip(images, labels))[file_number::NUM_RECORD_FILES]:
                features = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())

    (folder / "parquet").mkdir()
    # In row groups, because a reader takes one at a time.
    table = pa.table({"image": images, "label": labels})
    pq.write_table(table, folder / "parquet" / "train.parquet", row_group_size=GROUP_ROWS)
