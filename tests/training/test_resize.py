"""A run that was begun on two ranks goes on with one, or three: same samples, same joint batches, same weights.

Three starts of ranks carry many runs: two ranks make uninterrupted ones, whose checkpoints are cut off in mid-epoch;
one rank, and three, go on from there. Each start also records the images that its ranks read.
"""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from launching import many_runs
from run_folders import cut_off, distance, saved
from tiny_data import joined

pytestmark = pytest.mark.distributed

DIGITS = ["model=mlp", "dataset=digits", "schedule=cosine", "train.epochs=3"]
SAVED = ["checkpoint.every_steps=7", "checkpoint.keep=50"]
# 20 steps an epoch.
PLAIN = [
    *DIGITS,
    *SAVED,
    "dataset.shift_pixels=1",
    "dataset.num_validation=100",
]
# 23 steps.
PAD = [
    *DIGITS,
    *SAVED,
    "data.uneven=pad",
    "train.batch_size=[40,24]",
    "optimizer=momentum",
]
SCALE = [*DIGITS, *SAVED, "train.resize=scale"]  # 22 steps an epoch on two ranks
# Run -> its words, and the step at which it is cut off; in mid-epoch but for ends.
RUNS = {
    "plain": (PLAIN, 28),
    "pad": (PAD, 28),
    "middle": (SCALE, 28),
    "ends": (SCALE, 44),
    "other": (PLAIN, 28),
}
CHANGED = {"other": ["train.batch_size=16"]}
CROPS = [
    "dataset=image_folder",
    "dataset.image_shape=[8,8,3]",
    "augment=random_resized_crop",
    "train.batch_size=4",
]

SPEEDS = ("seconds", "examples_per_second", "flops_per_second")


def history(run_dir):
    lines = (run_dir / "history.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), map(float, line.split(",")))) for line in lines[1:]]
    return [{name: row[name] for name in row if name not in SPEEDS} for row in rows]


def cropped(images):
    """Runs that record the images read from a folder, with random crops: of one seed, and of another."""
    settings = [*CROPS, f"dataset.dir={images}"]
    return {"read": settings, "read other crops": [*settings, "seed=7"]}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of 26 JPEGs of unlike sizes: three steps an epoch on two ranks."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for number in range(26):
        path = folder / "train" / f"class_{number % 2}" / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20 + number, 40, 3), np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def two(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    made = {name: settings for name, (settings, _) in RUNS.items() if name not in ("ends", "other")}
    results, _ = many_runs("mpirun", 2, {**made, **cropped(images)}, folder)
    assert not [name for rank in results for name in rank if "error" in rank[name]], results
    shutil.copytree(folder / "middle", folder / "ends")
    shutil.copytree(folder / "plain", folder / "other")
    return folder


ONE = pytest.param(("mpirun", 1), id="one", marks=pytest.mark.nightly)
THREE = pytest.param(("gloo", 3), id="three", marks=pytest.mark.nightly)


@pytest.fixture(scope="module", params=[ONE, THREE])
def others(two, images, request, tmp_path_factory):
    """(folder, number of ranks, what they saw, output) of the ranks that go on."""
    launcher, num_ranks = request.param
    folder = tmp_path_factory.mktemp(f"on-{num_ranks}")
    for name, (_, step) in RUNS.items():
        cut_off(two / name, folder / name, step)
    runs = {name: [*settings, *CHANGED.get(name, [])] for name, (settings, _) in RUNS.items()}
    results, output = many_runs(launcher, num_ranks, {**runs, **cropped(images)}, folder)
    return folder, num_ranks, results, output


@pytest.mark.parametrize("name", ["plain", "pad"])
def test_the_weights_are_those_of_the_run_on_two_ranks(two, others, name):
    folder, num_ranks, results, output = others
    assert "record" in results[0][name], results[0][name]
    (our_step, ours), (their_step, on_two) = saved(folder / name), saved(two / name)
    assert our_step == their_step
    assert distance(ours, on_two) < 1e-5
    assert distance(saved(two / name, 49)[1], on_two) > 1e-3, "a few steps make a difference"
    batches = {
        ("plain", 3): "22 + 21 + 21 = 64 (by rank)",
        ("pad", 3): "22 + 21 + 21 = 64 (by rank)",
    }
    assert (
        f"global batch   {batches.get((name, num_ranks), '1 x 64 = 64 (ranks x batch)')}" in output
    )
    parts = " (22 + 21 + 21)" if num_ranks == 3 else ""
    resumed = f"steps were done, on 2 ranks; on {num_ranks} now: global batch 64 and learning rate as before{parts}\n"
    assert f"step-00000028: 28 of {their_step} {resumed}" in output


@pytest.mark.parametrize(("name", "each"), [("plain", 1280), ("pad", 1437)])
def test_each_sample_is_seen_once_and_the_epoch_begun_has_its_metrics(two, others, name, each):
    folder, num_ranks, results, _ = others
    record = results[0][name]["record"]
    assert record["proof"]["examples_each_epoch"] == [each, each]
    assert (record["num_ranks"], record["global_batch"], record["proof"]["ranks"]) == (
        num_ranks,
        64,
        num_ranks,
    )
    for ours, on_two in zip(history(folder / name), history(two / name), strict=True):
        assert ours == pytest.approx(on_two, rel=1e-5)
    on_two = json.loads((two / name / "result.json").read_text())
    assert record["test_loss"] == pytest.approx(on_two["test_loss"], rel=1e-5)
    assert record["test_accuracy"] == pytest.approx(on_two["test_accuracy"], rel=1e-5)


def test_the_ranks_read_the_random_crops_that_two_ranks_read(two, others):
    def joint(ranks, name):
        """The images of each step, of all ranks in turn."""
        return [joined(images) for images in zip(*(rank[name] for rank in ranks), strict=True)]

    on_two = json.loads((two / "found.json").read_text())
    _, num_ranks, results, _ = others
    assert len(results) == num_ranks and len(on_two) == 2
    steps = joint(on_two, "read")
    assert [len(images) for images in steps] == [8] * 6
    assert len({image for images in steps for image in images}) == 48, (
        "crops differ between images and epochs"
    )
    assert joint(results, "read") == steps
    assert joint(results, "read other crops") == joint(on_two, "read other crops") != steps


@pytest.mark.parametrize("name", ["middle", "ends"])
def test_scaled_from_the_end_of_the_epoch_on(two, others, name):
    """The plan of these ranks is that of a run that had been theirs from its beginning."""
    folder, num_ranks, results, output = others
    record, steps = results[0][name]["record"], {1: 44, 3: 14}[num_ranks]
    assert (record["global_batch"], record["num_steps"]) == (32 * num_ranks, 44 + steps)
    assert record["proof"]["examples_each_epoch"] == [32 * num_ranks * steps]
    assert distance(saved(folder / name, 44)[1], saved(two / "middle", 44)[1]) < 1e-5, (
        "the epoch begun went on as it was"
    )
    begun, *_, last = history(folder / name)
    assert begun == history(two / "middle")[0]
    assert (last["epoch"], last["step"], last["learning_rate"]) == (3, 44 + steps, 0), (
        "the schedule's end"
    )
    assert saved(folder / name)[0] == 44 + steps, "the newest checkpoint has the highest number"
    rate = f"global batch {32 * num_ranks} and learning rate {0.001 * num_ranks:g} from epoch 3 on (train.resize=scale)"
    assert output.count(rate) == 2
    assert (
        f"as before{' (22 + 21 + 21)' if num_ranks == 3 else ''} up to step 44, then train.resize=scale"
        in output
    )


def test_scaled_at_once_or_after_the_rest_of_an_epoch_ends_the_same(others):
    folder = others[0]
    assert distance(saved(folder / "middle")[1], saved(folder / "ends")[1]) < 1e-5


def test_another_batch_size_on_another_number_of_ranks_is_refused(others):
    for rank in others[2]:
        assert (
            "the run began with train.batch_size=32 on 2 ranks, and now it is 16 on"
            in rank["other"]["error"]
        )


@pytest.mark.nightly
@pytest.mark.parametrize("others", [THREE], indirect=True)
def test_there_and_back(two, others, tmp_path):
    """Begun on two ranks, gone on with three, ended on two."""
    cut_off(others[0] / "plain", tmp_path / "plain", 49)
    results, output = many_runs("mpirun", 2, {"plain": PLAIN}, tmp_path)
    assert "record" in results[0]["plain"], output
    assert (
        "49 of 60 steps were done, on 3 ranks; on 2 now: global batch 64 and learning rate as"
        in output
    )
    assert distance(saved(tmp_path / "plain")[1], saved(two / "plain")[1]) < 1e-5
    for ours, on_two in zip(history(tmp_path / "plain"), history(two / "plain"), strict=True):
        assert ours == pytest.approx(on_two, rel=1e-5)
