"""A network for segmentation on two ranks, with batch normalization over both, resumed in the middle of an epoch."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from launching import many_runs

# Its graphs of many synchronized layers take minutes. Nightly tests/models has a smaller network with such layers,
# and test_tasks_on_ranks.py the task.
pytestmark = [pytest.mark.distributed, pytest.mark.release, pytest.mark.timeout(600)]

SHAPES = [
    "model=deeplabv3plus", "model.backbone=MobileNetV2", "+model.alpha=0.35", "model.filters=8",
    "model.atrous_rates=[1,2,3]", "dataset=shapes", "dataset.image_shape=[32,40,3]", "dataset.num_train=24",
    "dataset.num_validation=0", "dataset.num_test=6", "dataset.flip=true", "task=segmentation", "schedule=polynomial",
    "train.batch_size=4", "train.steps=4", "train.sync_batch_norm=true", "optimizer=momentum",
]  # fmt: skip


def test_it_resumes_with_the_same_bits(tmp_path):
    runs = {"whole": SHAPES, "parts/1": [*SHAPES, "train.steps=2"], "parts/2": SHAPES}
    results, _ = many_runs("mpirun", 2, runs, tmp_path, timeout=560)
    assert results[0]["parts/2"]["record"]["first_step"] == 2
    assert "test_mean_iou" in results[0]["whole"]["record"]["metrics"]
    whole, resumed = (
        load_file(tmp_path / f"{run}/checkpoints/step-00000004/state.safetensors")
        for run in ("whole", "parts")
    )
    assert whole.keys() == resumed.keys()
    for key in whole:
        np.testing.assert_array_equal(whole[key], resumed[key], key)
