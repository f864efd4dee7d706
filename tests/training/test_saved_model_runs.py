"""model.keras of image files: decoded pixels of any size in, and in plain Keras the accuracy that was reported."""

import json

import numpy as np
import pytest
import tensorflow as tf

from launching import train, without_hvtrain

pytestmark = pytest.mark.distributed

COUNT_CORRECT = """
import json, pathlib
import keras, numpy as np
model = keras.models.load_model("run/model.keras")
classes = json.loads(pathlib.Path("run/model.json").read_text())["class_names"]
correct = 0
for path in pathlib.Path("data/test").glob("*/*.png"):
    image = keras.utils.img_to_array(keras.utils.load_img(path))
    correct += classes[model(image[None]).numpy().argmax()] == path.parent.name
print(correct)
"""


def write_pictures(folder, rng, count):
    """Noise of another colour for each class, not easily told apart, and no two of one size."""
    for number in range(count):
        name = ("bright", "dark", "red")[number % 3]
        mean = {"bright": [150, 150, 150], "dark": [110, 110, 110], "red": [150, 110, 110]}[name]
        height, width = rng.integers(5, 40, 2)
        pixels = np.clip(
            rng.normal(np.add(mean, rng.normal(0, 30, 3)), 60, (height, width, 3)), 0, 255
        )
        path = folder / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(pixels.astype("uint8")).numpy())


HALVES = [
    pytest.param(f"mixed_{kind}", marks=pytest.mark.release) for kind in ("bfloat16", "float16")
]


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["float32", *HALVES])
def test_image_files_of_different_sizes(tmp_path, precision):
    rng = np.random.default_rng(0)
    write_pictures(tmp_path / "data/train", rng, 90)
    write_pictures(tmp_path / "data/test", rng, 60)
    arguments = [
        "dataset=image_folder",
        "dataset.dir=data",
        "dataset.image_shape=[12,12,3]",
        "model=mlp",
    ]
    arguments += [
        "train.epochs=3",
        "train.batch_size=16",
        f"train.precision={precision}",
        "run.dir=run",
    ]
    code, output = train(None, 1, *arguments, "strategy=single", cwd=tmp_path)
    assert code == 0, output
    assert "may predict wrongly" not in output
    result = json.loads((tmp_path / "run/result.json").read_text())
    correct = result["test_accuracy"] * 60
    assert 25 < correct < 60, "one that learns, and errs"
    assert int(without_hvtrain(COUNT_CORRECT, cwd=tmp_path)) == pytest.approx(correct, abs=1e-3)
    description = json.loads((tmp_path / "run/model.json").read_text())
    assert description["class_names"] == ["bright", "dark", "red"] and description["input"][
        "shape"
    ] == [None, None, 3]
