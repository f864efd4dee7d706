"""`benchmarks input`: how fast image files become batches, against Keras's reader and pipelines by hand.

The images are the same in all formats: JPEG files in a folder, in TFRecord files, and in a Parquet
file.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.experiment import Experiment, plot_bars
from benchmarks.processes import WARMUP, Command, python_line, run_and_report, thread_variables
from hvtrain.compare.rounds import Ratio, progress, ratio

WORKER = "benchmarks.by_hand.input_pipelines"
WARMUP_STEPS = 12
BATCH_SIZE = 32
NUM_CLASSES = 10
TRAINED = (224, 224, 3)  # Height, width and channels that a model sees.
FORMATS = ("image_folder", "tfrecord", "parquet")
NUM_RECORD_FILES = 8
GROUP_ROWS = 100

JPEG_QUALITY = 90
# Cells across an image, and how much they count: from large shapes to fine texture.
TEXTURE = ((4, 0.5), (12, 0.3), (40, 0.2), (112, 0.13))
GRAIN = 5.0  # Standard deviation of each pixel's noise. So a file of 224x224 has 19 KB, about as photographs do.

# Size of the files, format, contender.
Case = tuple[str, str, str]


@dataclass(frozen=True)
class Reading:
    """One run of a contender.

    Attributes:
        examples_per_second: Of the pipeline alone.
        cpu_ms_per_example: Time of all threads of the process on cores, which depends less on what
            else the machine does.
        peak_bytes: Memory of the process.
    """

    examples_per_second: float
    cpu_ms_per_example: float
    peak_bytes: int


@dataclass
class Inputs(Experiment[Case, Reading]):
    """All pipelines on files of several sizes.

    Attributes:
        sizes: Heights and widths of the files. All become TRAINED.
        num_images: In each format.
        steps: Timed steps.
    """

    sizes: Sequence[tuple[int, int]]
    num_images: int
    steps: int

    def cases(self) -> list[Case]:
        cases = []
        for height, width in self.sizes:
            for file_format in FORMATS:
                contenders = ["hvtrain", "by-hand"]
                if file_format == "image_folder":
                    contenders.append("keras")
                if (height, width) != TRAINED[:2]:
                    # Only hvtrain antialiases by itself, so a pipeline by hand that does it too
                    # stands beside.
                    contenders.append("by-hand-antialiased")
                cases += [(f"{height}x{width}", file_format, contender) for contender in contenders]

        return cases

    def name(self, case: Case) -> str:
        return " ".join(case)

    def run(self, num_rounds: int) -> None:
        """Writes the images, and measures all pipelines in turns."""
        for height, width in self.sizes:
            progress(f"writing {self.num_images} images of {height}x{width} ...")
            write_images(self.folder / "data" / f"{height}x{width}", self.num_images, height, width)
        super().run(num_rounds)

    def measure(self, case: Case, folder: Path) -> Reading:
        size, file_format, contender = case
        data = self.folder / "data" / size / file_format
        numbers = (self.num_images, self.threads, WARMUP_STEPS + self.steps)
        arguments = [contender, file_format, str(data), *map(str, numbers)]
        variables = {WARMUP: str(WARMUP_STEPS), **thread_variables(self.threads)}
        (report,) = run_and_report(WORKER, [Command(python_line(WORKER, arguments))], 1, folder, variables)

        return Reading(
            examples_per_second=BATCH_SIZE / report["step_seconds"],
            cpu_ms_per_example=1000 * report["step_cpu_seconds"] / BATCH_SIZE,
            peak_bytes=report["peak_bytes"],
        )

    def describe(self, result: Reading) -> str:
        return f"{result.examples_per_second:10,.0f} examples/s{result.cpu_ms_per_example:8.3f} CPU ms each"

    def _ratio(self, case: Case, figure: str) -> Ratio:
        """hvtrain's figure / that of the case, in the same rounds."""
        size, file_format, _ = case
        # hvtrain reads the same files in the same format.
        ours = self.results[size, file_format, "hvtrain"]
        others = self.results[case]
        return ratio([getattr(run, figure) for run in ours], [getattr(run, figure) for run in others])

    def table(self) -> list[str]:
        """Lines to print: medians over the rounds, and ratios with their intervals."""
        num_rounds = len(next(iter(self.results.values())))
        height, width, _ = TRAINED

        lines = [
            f"{self.num_images} JPEG images to {height}x{width} float32, batch {BATCH_SIZE}, {self.threads} "
            f"thread(s), {self.steps} steps, medians of {num_rounds} rounds",
            f"{'files':<9}{'format':<14}{'contender':<21}{'examples/s':>10}{'CPU ms':>8}{'peak MB':>9}  "
            f"{'examples/s, hvtrain / it':<34}CPU time, hvtrain / it",
        ]
        for case, runs in self.results.items():
            size, file_format, contender = case
            middle = Reading(*(median(getattr(run, key) for run in runs) for key in Reading.__dataclass_fields__))
            ratios = ""
            if contender != "hvtrain":
                speed = self._ratio(case, "examples_per_second")
                ratios = f"{speed!s:<34}{self._ratio(case, 'cpu_ms_per_example')}"
            lines.append(
                f"{size:<9}{file_format:<14}{contender:<21}{middle.examples_per_second:>10,.0f}"
                f"{middle.cpu_ms_per_example:>8.3f}{middle.peak_bytes / 1e6:>9,.0f}  {ratios}"
            )

        return lines

    def write(self) -> None:
        """Writes input.json in the folder: settings, and one row per run."""
        rows = [
            {
                "size": size,
                "format": file_format,
                "contender": contender,
                "round": number,
                **asdict(run),
            }
            for (size, file_format, contender), runs in self.results.items()
            for number, run in enumerate(runs, 1)
        ]
        settings = {name: getattr(self, name) for name in ("num_images", "steps", "threads")}
        (self.folder / "input.json").write_text(json.dumps({**settings, "runs": rows}, indent=1))

    def plot(self) -> None:
        """Writes bench.png: CPU time per example of each pipeline."""
        values = {self.name(case): [run.cpu_ms_per_example for run in runs] for case, runs in self.results.items()}
        plot_bars(self.folder / "bench.png", values, "CPU ms per example")


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
    Image.fromarray((225 * pixels + grain).clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=JPEG_QUALITY)
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
        with tf.io.TFRecordWriter(str(folder / "tfrecord" / f"train-{file_number}.tfrecord")) as writer:
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
