"""Training on Spark: a real cluster of two workers on this machine, and data that Spark itself wrote."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pyarrow.parquet
import pytest

from hvtrain.errors import ConfigError
from hvtrain.launch.cluster_files import submission, texts, write
from hvtrain.launch.cluster_kinds import Spark
from hvtrain.launch.job import Job, parse_hosts
from hvtrain.spark import parse, rank_environment, run_ranks
from launching import ROOT, finish, start
from pages import PAGES, blocks

MISSING = [
    *(["java (apt-get install openjdk-17-jre-headless)"] if shutil.which("java") is None else []),
    *(["pyspark (scripts/lock/spark.txt)"] if importlib.util.find_spec("pyspark") is None else []),
]
on_spark = pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}")

# Two workers with one core each, which start executors in processes of their own.
MASTER = "local-cluster[2,1,1024]"
DEFAULTS = f"""\
spark.master {MASTER}
spark.driver.host 127.0.0.1
spark.driver.bindAddress 127.0.0.1
spark.ui.enabled false
"""

WRITE = """
import sys
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

pixels, labels = load_digits(return_X_y=True)
rows = [(row.tolist(), int(label)) for row, label in zip(pixels, labels)]
spark = SparkSession.builder.master("local[2]").getOrCreate()
for split, part in (("train", rows[:1437]), ("test", rows[1437:])):
    frame = spark.createDataFrame(part, "image array<float>, label int")
    frame.repartition(4).write.parquet(f"{sys.argv[1]}/{split}")
spark.stop()
"""


# A program with a session of its own: parameter servers train on its rows, and executors predict others.
FIT = """
import json
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
import hvtrain.spark

pixels, labels = load_digits(return_X_y=True)
rows = [(row.tolist(), int(label)) for row, label in zip(pixels, labels)]
spark = SparkSession.builder.master("local-cluster[2,2,1024]").getOrCreate()
parts = [row for index, row in enumerate(rows) if index % 5], rows[::5]
train, others = (spark.createDataFrame(part, "pixels array<float>, digit int").coalesce(1) for part in parts)
settings = ["strategy=parameter_server_sync", "model=mlp", "train.epochs=6", "run.report=false", "run.dir=run"]
model = hvtrain.spark.fit(train, [*settings, "dataset.target=digit", "dataset.num_test=0"], num_ranks=4)
predicted = model.transform(others).select("digit", "prediction.*").collect()
right = sum(row.digit == row["class"] == int(row.name) for row in predicted)
print("found " + json.dumps([right / len(predicted), sorted(predicted[0].asDict())]))
spark.stop()
"""


# What the page's program on DataFrames has: a session, rows with a price and, for its last block, images.
ON_THE_PAGE = """
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

spark = SparkSession.builder.master("local[4]").config("spark.task.maxFailures", 1).getOrCreate()
rows = [(number, number % 7 + 0.5, number % 5 * 2.0, number % 7 + number % 5 * 4.0) for number in range(400)]
frame = other_frame = spark.createDataFrame(rows, "id int, rooms double, floor double, price double")
"""
REFUSED = """
try:
    model.transform(frame.drop("rooms"))
except hvtrain.errors.DataError as error:
    print(f"refused: {error}")
"""
IMAGES = """
pixels, labels = load_digits(return_X_y=True)
rows = [(row.tolist(), int(label)) for row, label in zip(pixels, labels)]
frame = spark.createDataFrame(rows, "image array<float>, label int")
"""


@pytest.fixture(scope="module")
def spark_conf(tmp_path_factory):
    """The folder of spark-defaults.conf; afterwards the workers' folders, inside pyspark, go."""
    folder = tmp_path_factory.mktemp("spark")
    (folder / "spark-defaults.conf").write_text(DEFAULTS)
    work = Path(importlib.util.find_spec("pyspark").origin).parent / "work"
    before = set(work.glob("app-*"))
    yield folder
    for made in set(work.glob("app-*")) - before:
        shutil.rmtree(made)


def run(*command, cwd, conf, **extra):
    """Exit code and everything printed."""
    process = start(
        None, 1, *command, cwd=cwd, SPARK_CONF_DIR=str(conf), SPARK_LOCAL_IP="127.0.0.1", **extra
    )
    output = finish(process, timeout=560)
    return process.returncode, output


def said(output):
    """The lines of ours, without Spark's."""
    return [line for line in output.splitlines() if line.startswith("hvtrain")]


@on_spark
@pytest.mark.distributed
@pytest.mark.nightly
def test_two_executors_train_together(tmp_path, spark_conf):
    settings = [
        "model=mlp",
        "model.hidden=[8]",
        "train.steps=20",
        "guard.every=5",
        "run.report=false",
        "run.dir=run",
    ]
    code, output = run(
        "python", "-m", "hvtrain", "spark", "--np", "2", *settings, cwd=tmp_path, conf=spark_conf
    )
    assert code == 0, output
    assert "(Horovod on Gloo)" in output and "weights equal on 2/2 ranks" in output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["num_ranks"] == 2 and result["reductions"] == result["num_steps"] > 0
    assert len(list((tmp_path / "run" / "logs").glob("rank-000?.log"))) == 2


@on_spark
@pytest.mark.distributed
@pytest.mark.release
def test_servers_learn_a_data_frame_and_executors_predict_another(tmp_path, spark_conf):
    code, output = run(sys.executable, "-c", FIT, cwd=tmp_path, conf=spark_conf)
    assert code == 0, output
    (found,) = re.findall(r"^found (.*)", output, re.MULTILINE)
    accuracy, columns = json.loads(found)
    assert accuracy > 0.95
    assert columns == [
        "class",
        "digit",
        "name",
        *(f"p_{name}" for name in range(10)),
        "probability",
    ]
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (
        len(record["proof"]["steps_by_worker"]) == 2 and min(record["proof"]["steps_by_worker"]) > 0
    )


@on_spark
@pytest.mark.distributed
@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_python_of_the_page(tmp_path, spark_conf):
    """As it stands; the folders that it names are links for so long."""
    fit, write_images = blocks(PAGES["spark"], "python")
    (tmp_path / "page.py").write_text("".join([ON_THE_PAGE, fit, REFUSED, IMAGES, write_images]))
    with ExitStack() as links:
        for link in (Path("/shared"), Path("/data")):
            try:
                link.symlink_to(tmp_path)
            except OSError as error:
                pytest.skip(f"{link} cannot be made here: {error.strerror}")
            links.callback(link.unlink)
        code, output = run(sys.executable, "page.py", cwd=tmp_path, conf=spark_conf)
    assert code == 0, output
    assert len(re.findall(r"^\| *\d+\| *-?\d+\.\d+\|$", output, re.MULTILINE)) == 20, output
    record = json.loads((tmp_path / "runs/houses/result.json").read_text())
    assert record["num_ranks"] == 4 and record["proof"]
    assert re.search("^refused: the rows cannot be predicted: input=/.*rooms", output, re.MULTILINE)
    assert pyarrow.parquet.read_table(tmp_path / "images/train").num_rows == 1797


@on_spark
@pytest.mark.distributed
@pytest.mark.release
@pytest.mark.timeout(900)
def test_two_executors_train_on_what_spark_wrote_and_go_on_from_there(tmp_path, spark_conf):
    """By the launcher's line for spark-submit, on Gloo; then by python -m, on MPI, from the checkpoint on."""
    code, output = run(sys.executable, "-c", WRITE, "data", cwd=tmp_path, conf=spark_conf)
    assert code == 0, output
    assert len(list((tmp_path / "data" / "train").glob("part-*.parquet"))) == 4

    settings = [
        "dataset=parquet",
        "dataset.dir=data",
        "dataset.image_shape=[8,8,1]",
        "dataset.num_classes=10",
    ]
    settings += ["dataset.scale=16", "run.dir=run", "guard.every=20"]
    job = Job(("python", "-m", "hvtrain", *settings, "train.epochs=3"), 2)
    cluster = Spark(master=MASTER, cores_per_rank=1)
    write(cluster, job, tmp_path)
    code, output = run(*submission(cluster, tmp_path), cwd=tmp_path, conf=spark_conf)
    assert code == 0, output
    assert "(Horovod on Gloo)" in output and "weights equal on 2/2 ranks" in output
    first = json.loads((tmp_path / "run" / "result.json").read_text())
    assert first["num_ranks"] == 2 and first["first_step"] == 0
    assert first["reductions"] == first["num_steps"] > 0
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*/SHA256SUMS"))) == 2
    assert len(list((tmp_path / "run" / "logs").glob("rank-000?.log"))) == 2

    line = ["python", "-m", "hvtrain", "spark", "--np", "2", "--mpi", *settings, "train.epochs=8"]
    code, output = run(*line, cwd=tmp_path, conf=spark_conf)
    assert code == 0, output
    assert "(Horovod on MPI)" in output and "weights equal on 2/2 ranks" in output
    second = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (
        second["first_step"] == first["num_steps"]
        and second["num_steps"] == first["num_steps"] * 8 // 3
    )
    assert second["test_accuracy"] > 0.85


@on_spark
@pytest.mark.distributed
@pytest.mark.release
@pytest.mark.parametrize(
    ("settings", "code", "first"),
    [
        (
            ["train.batch_size=5000"],
            2,
            "hvtrain: train.batch_size=5000 exceeds the 718 examples of a rank ",
        ),
        (["model=tiny", "dataset=leaves", "model.fail_on_rank=1"], 1, "hvtrain: rank 1 on "),
    ],
)
def test_what_stops_a_rank_is_said_once_on_the_driver(settings, code, first, tmp_path, spark_conf):
    own = ROOT / "tests/support/own"
    line = ["hvtrain.spark", "--np=2", "--config-dir", str(own / "conf"), *settings, "run.dir=run"]
    exit_code, output = run(
        "python", "-m", *line, cwd=tmp_path, conf=spark_conf, PYTHONPATH=str(own)
    )
    assert exit_code == code, output
    assert said(output)[0].startswith(first)
    assert re.fullmatch(rf"hvtrain spark: rank \d ended with exit code {code}", said(output)[-1])
    if code == 2:
        assert len(said(output)) == 2 and "Traceback" not in output
    assert "SparkException" not in output


class TwoTasks:
    """What run_ranks asks a SparkContext of local[2] before it starts ranks."""

    master = "local[2]"
    defaultParallelism = 2  # noqa: N815

    def getConf(self):  # noqa: N802
        return {}


def test_more_ranks_than_tasks_at_once_are_refused():
    """Horovod would wait ten minutes for them."""
    message = "4 ranks need as many tasks at once, and Spark's master local[2] runs 2; use fewer"
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_ranks(TwoTasks(), None, [], num_ranks=4)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "program", [["-m", "hvtrain", "spark"], [str(ROOT / "hvtrain" / "spark.py")]]
)
def test_a_bad_word_is_refused_before_spark_starts(program, tmp_path):
    for arguments, message in [
        (["train.epoch=3"], "unknown setting 'train.epoch'; did you mean 'train.epochs'?"),
        (
            ["--np", "two"],
            "argument --np/-np: two is not a whole number of at least 1; "
            "see python -m hvtrain spark --help",
        ),
    ]:
        code, output = run("python", *program, *arguments, cwd=tmp_path, conf=tmp_path)
        assert (code, output) == (2, f"hvtrain: {message}\n")


def test_options_and_settings_are_told_apart():
    for line, expected in {
        "--np=3 a=1 --mpi": (3, True, ["a=1"]),
        "a=1 -np 2 --gloo b=2": (2, False, ["a=1", "b=2"]),
        "--config-dir own --cfg job a=1": (
            None,
            False,
            ["--config-dir", "own", "--cfg", "job", "a=1"],
        ),
    }.items():
        options = parse(line.split())
        assert (options.np, options.mpi, options.overrides) == expected


def test_ranks_get_no_secret_and_keep_their_own_paths(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("HVTRAIN_API_KEY", "hidden")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "2")
    monkeypatch.setenv("PYTHONPATH", "/driver/only")
    monkeypatch.setenv("OMPI_MCA_plm", "^rsh")
    for mpi in (False, True):
        variables = rank_environment(mpi)
        assert variables["TF_NUM_INTRAOP_THREADS"] == "2"
        assert "hidden" not in variables.values() and not {
            "PYTHONPATH",
            "OMPI_MCA_plm",
            "HOME",
        } & set(variables)
        assert ("PATH" in variables) == mpi, "mpirun is looked for"


WORDS = ("python", "-m", "hvtrain", "callbacks=[a,b]")


def submitted(tmp_path, job, **settings):
    """The arguments that the script gives to spark-submit."""
    cluster = Spark(**settings)
    write(cluster, job, tmp_path / "a b")
    (tmp_path / "spark-submit").write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    (tmp_path / "spark-submit").chmod(0o755)
    done = subprocess.run(
        submission(cluster, tmp_path / "a b"),
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    line = done.stdout.split("\0")[:-1]
    return line, [conf for before, conf in itertools.pairwise(line) if before == "--conf"]


def test_the_line_for_yarn(tmp_path):
    job = Job((*WORDS, "x=it's $HOME"), 8, controller="mpi", environment={"NCCL_DEBUG": "a 'b' $c"})
    line, confs = submitted(
        tmp_path,
        job,
        executors=2,
        queue="gpu",
        gpus_per_rank=1,
        gpu_discovery_script="/opt/g.sh",
        python="/env/python",
    )
    assert line[:8] == "--master yarn --deploy-mode client --name hvtrain --queue gpu".split()  # noqa: SIM905
    script = f"{tmp_path}/a b/hvtrain_on_spark.py"
    assert line[-6:] == [script, "--np", "8", "--mpi", "callbacks=[a,b]", "x=it's $HOME"]
    assert dict(conf.split("=", 1) for conf in confs) == {
        "spark.task.cpus": "4",
        "spark.executor.cores": "16",
        "spark.executor.memory": "1g",
        "spark.executor.memoryOverhead": "32g",
        "spark.dynamicAllocation.enabled": "false",
        "spark.executor.instances": "2",
        "spark.task.resource.gpu.amount": "1",
        "spark.executor.resource.gpu.amount": "4",
        "spark.executor.resource.gpu.discoveryScript": "/opt/g.sh",
        "spark.pyspark.python": "/env/python",
        "spark.pyspark.driver.python": "/env/python",
        "spark.executorEnv.NCCL_DEBUG": "a 'b' $c",
    }
    assert compile(Path(script).read_text(), script, "exec")


def test_the_line_for_a_standalone_master_and_for_a_driver_inside_yarn(tmp_path):
    _, confs = submitted(tmp_path, Job(WORDS, 3), master="spark://s1:7077", cores_per_rank=2)
    assert "spark.cores.max=6" in confs and not any(
        "instances" in conf or "gpu" in conf for conf in confs
    )
    job = Job((*WORDS, "run.dir=/shared/run"), 2, environment={"TZ": "UTC"})
    _, confs = submitted(tmp_path, job, deploy_mode="cluster")
    assert {"spark.executorEnv.TZ=UTC", "spark.yarn.appMasterEnv.TZ=UTC"} <= set(confs)


@pytest.mark.parametrize(
    ("job", "settings", "message"),
    [
        (
            Job(("python", "train.py"), 2),
            {},
            "can only train with python -m hvtrain, not run python train.py",
        ),
        (Job(WORDS, 2, min_ranks=1), {}, "does not take --min-np; its ranks are fixed"),
        (Job(WORDS, 2, parse_hosts("s1:2")), {}, "does not take -H; Spark chooses the hosts"),
        (
            Job(WORDS, 2),
            {"master": "s1:7077"},
            "cluster.master=s1:7077 is not a master; give yarn or spark://HOST:7077",
        ),
        (Job(WORDS, 3), {"executors": 2}, "cluster.executors=2 does not divide 3 ranks"),
        (
            Job(WORDS, 2),
            {"memory_per_rank": "8 GB"},
            "cluster.memory_per_rank=8 GB is not an amount of memory",
        ),
        (Job(WORDS, 2), {"gpus_per_rank": 2}, "a rank uses one GPU; give 0 or 1"),
        (Job(WORDS, 2), {"deploy_mode": "cluster"}, "give run.dir=/a/folder/that/all/hosts/see"),
        (
            Job(WORDS, 2),
            {"deploy_mode": "cluster", "master": "spark://s1:1"},
            "needs cluster.master=yarn, not spark://s1:1",
        ),
    ],
)
def test_what_cannot_start_is_refused(job, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        texts(Spark(**settings), job)
