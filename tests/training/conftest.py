"""The start of two ranks that test_bad_input.py and test_runs.py share."""

import pytest

from launching import many_runs
from more_metrics import MORE_METRICS

DIGITS = ["model=mlp", "dataset=digits", "optimizer=momentum", "train.epochs=2"]
SUMS = [*DIGITS, "train.learning_rate_scale=none"]
HALF = [*DIGITS, "train.precision=mixed_float16"]
RUNS = {
    # Refused.
    "unwritable": ["run.dir={folder}/file/run"],
    "settings": ["seed={rank}"],
    "forgetful": ["strategy=forgetful"],
    "elastic": ["strategy=elastic"],
    # Trained.
    "uneven": ["train.steps=1", "optimizer.learning_rate=1e-12", "dataset.num_validation=51", *MORE_METRICS],
    "one batch": [*SUMS, "train.batch_size=32"],
    "two batches": [*SUMS, "train.batch_size=16", "train.accumulate=2"],
    "plain": HALF,
    "xla": [*HALF, "train.jit_compile=true"],
    "agreed": ["run.dir=null", "train.steps=7", "train.validate_every_steps=3", "dataset.num_validation=20"],
    "clock": ["train.epochs=12", "dataset.num_validation=64", "checkpoint.every_minutes=0.001", "schedule=cosine",
              "checkpoint.every_epochs=null", "checkpoint.keep=1", "checkpoint.best=val_loss"],
}  # fmt: skip


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """(folder, what each rank saw of RUNS, all output)."""
    folder = tmp_path_factory.mktemp("two-ranks")
    (folder / "file").touch()
    runs = {
        name: [setting.replace("{folder}", str(folder)) for setting in settings]
        for name, settings in RUNS.items()
    }
    results, output = many_runs("mpirun", 2, runs, folder, TF_CPP_MIN_LOG_LEVEL="0")
    return folder, results, output
