"""A step on an embedding table: sharded over the ranks, on all ranks, and on a parameter server.

    python -m benchmarks.tables                          5 million rows of 32, 4,096 ids a step, 4 ranks
    python -m benchmarks.tables --rows 100000 --rounds 1

The contenders run in turns, each in processes of its own. `sharded` is hvd.ShardedEmbedding with
LazyAdam; `lazy` and `adam` are a plain Embedding on all ranks, with LazyAdam and with Keras's Adam;
`server` is strategy=parameter_server with Keras's Adam in as many processes, of which two are the
coordinator and the server. Ids follow Zipf's law. A step of the server is as many ids as one of all ranks.
With 5 million rows the server takes 15 GB. Memory is the largest resident set of a
rank, after that of one with a table of one row is taken off; bytes are those of the loopback interface,
where each byte that a rank sends is one that another receives.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hvtrain.report.ratios import ratio
from hvtrain.system.console import progress

KINDS = ("sharded", "lazy", "adam", "server")
REPORT = "HVTRAIN_TABLES_REPORT"
WARMUP_STEPS = 3
EXPONENT = 1.2


def main() -> int:
    options = _options()
    if options.worker:
        _work(options)
        return 0

    reports: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    base = _start("sharded", options, rows=options.ranks)["memory_mib"]
    for number in range(options.rounds):
        for kind in KINDS:
            progress(f"round {number + 1} of {options.rounds}: {kind}")
            reports[kind].append(_start(kind, options, options.rows))

    print(f"{'':10}{'ms a step':>12}{'sharded / it':>34}{'MiB a rank':>12}{'KiB sent a rank':>17}")
    ours = [report["seconds"] for report in reports["sharded"]]
    for kind, rounds in reports.items():
        seconds = [report["seconds"] for report in rounds]
        cells = [
            f"{kind:10}{1e3 * statistics.median(seconds):>12,.1f}",
            f"{ratio(ours, seconds)!s:>34}",
        ]
        if kind != "server":
            cells.append(
                f"{statistics.median(report['memory_mib'] for report in rounds) - base:>12,.0f}"
            )
            cells.append(f"{statistics.median(report['sent_kib'] for report in rounds):>17,.0f}")
        print("".join(cells))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--width", type=int, default=32, help="numbers in a row (default: 32)")
    parser.add_argument(
        "--ids", type=int, default=4096, help="of all ranks in a step (default: 4096)"
    )
    parser.add_argument(
        "--ranks", type=int, default=4, help="at least 3, for the server's processes (default: 4)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=10, help="timed ones of each start (default: 10)"
    )
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _start(kind: str, options: argparse.Namespace, rows: int) -> dict:
    """Runs a contender in processes of its own; returns its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        if kind == "server":
            line = _server_line(options, rows, Path(folder) / "run")
        else:
            sizes = [f"--{name}={getattr(options, name)}" for name in ("width", "ids", "steps")]
            line = ["-m", "benchmarks.tables", f"--worker={kind}", f"--rows={rows}", *sizes]
        launcher = [
            f"{sys.prefix}/bin/horovodrun",
            "--gloo",
            "-np",
            str(options.ranks),
            sys.executable,
        ]
        environment = {**os.environ, REPORT: str(report), "TF_CPP_MIN_LOG_LEVEL": "2"}
        done = subprocess.run(
            [*launcher, *line], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{kind} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        if kind != "server":
            return json.loads(report.read_text())
        result = json.loads((Path(folder) / "run" / "result.json").read_text())
        return {"seconds": options.ids / result["examples_per_second"]}


def _server_line(options: argparse.Namespace, rows: int, folder: Path) -> list[str]:
    """The arguments of a run whose table is on a parameter server."""
    batch_size = options.ids // (options.ranks - 2)
    num_examples = options.ids * (WARMUP_STEPS + options.steps)
    return [
        *(
            "-m",
            "hvtrain",
            "strategy=parameter_server",
            "optimizer=adam",
            "task=binary",
            f"run.dir={folder}",
        ),
        *(
            "dataset=clicks",
            f"dataset.category_sizes=[{rows},2]",
            f"dataset.num_train={num_examples}",
        ),
        *(
            "dataset.num_test=100",
            "model=dlrm",
            f"model.width={options.width}",
            "model.bottom=[]",
            "model.top=[]",
        ),
        *(f"train.batch_size={batch_size}", "train.epochs=1", "run.report=false", "guard.every=0"),
    ]


def _work(options: argparse.Namespace) -> None:
    """Trains one contender on this rank; rank 0 writes the report."""
    import keras
    import numpy as np
    import tensorflow as tf

    import hvtrain.keras as hvd

    hvd.init()
    layer_kind = hvd.ShardedEmbedding if options.worker == "sharded" else keras.layers.Embedding
    ids = keras.Input((1,), dtype="int64")
    rows = layer_kind(options.rows, options.width)(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    kind = keras.optimizers.Adam if options.worker == "adam" else hvd.optimizers.LazyAdam
    optimizer = hvd.DistributedOptimizer(kind(0.001))
    optimizer.build(model.trainable_variables)
    hvd.broadcast_model(model)

    @tf.function
    def step(batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    random = np.random.default_rng(hvd.rank())
    shape = (WARMUP_STEPS + options.steps, options.ids // hvd.size(), 1)
    batches = tf.constant((random.zipf(EXPONENT, shape) - 1) % options.rows, tf.int64)
    seconds = []
    sent_before = 0
    for number, batch in enumerate(batches):
        hvd.allreduce(tf.zeros(1), name="together")
        if number == WARMUP_STEPS:
            sent_before = _sent_bytes()
        began = time.perf_counter()
        step(batch)
        hvd.allreduce(tf.zeros(1), name="done")
        seconds.append(time.perf_counter() - began)
    sent = (_sent_bytes() - sent_before) / options.steps / hvd.size()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    memories = hvd.allgather_object(memory)
    if hvd.rank() == 0:
        median = statistics.median(seconds[WARMUP_STEPS:])
        report = {"seconds": median, "memory_mib": max(memories), "sent_kib": sent / 1024}
        Path(os.environ[REPORT]).write_text(json.dumps(report))
    hvd.shutdown()


def _sent_bytes() -> int:
    """Bytes that all processes of this host have sent over the loopback interface."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[8])


if __name__ == "__main__":
    sys.exit(main())
