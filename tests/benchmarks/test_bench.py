"""The quick form of the benchmarks: every contender runs, and does the same work. No time is asserted."""

import json
import sys

import numpy as np
import pytest

from benchmarks.by_hand.input_pipelines import PIPELINES
from benchmarks.contenders import CONTENDERS, TRAIN
from benchmarks.goals import of_steps
from benchmarks.input import BATCH_SIZE, TRAINED, WORKS, Inputs, write_images
from in_process import run_command
from launching import finish, run, start

pytestmark = pytest.mark.distributed
nightly, release = pytest.mark.nightly, pytest.mark.release

BENCH = [sys.executable, "-m", "benchmarks"]


# It takes a minute: contenders are two fresh processes each. The first runs twice, here one that is a single process.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["keras", "hvtrain-mpi", "multi-worker"], marks=nightly),
        pytest.param(TRAIN, marks=release),
    ],
    ids=["some", "all"],
)
def test_contenders_do_the_same_work(names, tmp_path):
    arguments = [
        "steps",
        "--workload",
        "tiny",
        "--steps",
        "30",
        "--rounds",
        "1",
        "--output",
        str(tmp_path / "bench"),
    ]
    process = start(None, 1, *BENCH, *arguments, "--contenders", ",".join(names), cwd=tmp_path)
    output = finish(process, timeout=800)
    assert process.returncode == 0, output
    session = json.loads((tmp_path / "bench" / "bench.json").read_text())
    runs = {row["contender"]: row for row in session["runs"]}
    assert set(runs) - {f"{names[0]} again"} == set(names)
    joint = [runs[name]["loss"] for name in names if CONTENDERS[name].is_one_job]
    assert len(joint) >= 2 and max(joint) - min(joint) < 1e-4 * min(joint), (
        "the same samples, weights and steps"
    )
    assert abs(runs["keras"]["loss"] - joint[0]) > 1e-3, "one rank takes other steps"
    assert all(row["step_seconds"] > 0 and row["peak_bytes"] > 1e8 for row in runs.values())
    assert any(
        line.startswith("examples_per_second of hvtrain-mpi / multi-worker >= 6.00")
        for line in of_steps(session)
    )


@pytest.mark.parametrize(
    ("arguments", "file", "text"),
    [
        pytest.param(
            *(["scaling", "-np", "2"], "scaling.json", "against jobs apart"), marks=release
        ),
        pytest.param(
            *(
                ["steps", "--contenders", "batches@data=synthetic,independent"],
                "bench.json",
                "batches@data=synthetic",
            ),
            marks=release,
        ),
        pytest.param(
            *(
                ["steps", "--epochs", "5", "--contenders", "hvtrain-1,hvtrain-1@output=terminal"],
                "bench.json",
            ),
            "hvtrain-1@output=terminal ",
            marks=release,
        ),
        pytest.param(
            *(
                ["startup", "--contenders", "hvtrain-1"],
                "bench.json",
                "time to the first step against hvtrain-1",
            ),
            marks=release,
        ),
    ],
)
def test_other_kinds(arguments, file, text, tmp_path):
    arguments = [
        *arguments,
        "--workload",
        "tiny",
        "--steps",
        "30",
        "--rounds",
        "1",
        "--output",
        str(tmp_path / "bench"),
    ]
    code, output = run(None, 1, *BENCH, *arguments, cwd=tmp_path)
    assert code == 0 and text in output, output
    assert {file, "bench.png"} <= {path.name for path in (tmp_path / "bench").iterdir()}


@pytest.mark.parametrize(
    "transport", [pytest.param("mpi", marks=nightly), pytest.param("gloo", marks=release)]
)
def test_allreduce(transport, tmp_path):
    arguments = [
        "--transport",
        transport,
        "--rounds",
        "1",
        "--largest",
        "4",
        "--output",
        str(tmp_path / "bench"),
    ]
    # Beside MPI's own, over MPI.
    module = ["benchmarks.allreduce"] if transport == "mpi" else ["hvtrain", "allreduce"]
    code, output = run(None, 1, sys.executable, "-m", *module, *arguments, cwd=tmp_path)
    assert code == 0, output
    assert ("160 tensors of 64 KiB" in output) is ("mpi4py us" in output) is (transport == "mpi")
    seconds = json.loads((tmp_path / "bench" / "allreduce.json").read_text())["seconds"]["hvtrain"]
    for kind in ("", "half-", "gather-", "bytes-"):
        assert seconds[f"{kind}4194304"][0] > seconds[f"{kind}4"][0] > 0


@release
def test_input_compares_all_pipelines(tmp_path):
    arguments = ["--images", "64", "--steps", "3", "--rounds", "1", "--sizes", "240x320"]
    code, output = run(
        None, 1, *BENCH, "input", *arguments, "--output", str(tmp_path / "bench"), cwd=tmp_path
    )
    assert code == 0 and "CPU time, hvtrain / it" in output and "cores for 1,500/s" in output, (
        output
    )
    runs = json.loads((tmp_path / "bench" / "input.json").read_text())["runs"]
    cases = [(row["size"], row["work"], row["format"], row["contender"]) for row in runs]
    assert sorted(cases) == sorted(Inputs(tmp_path, 2, [(240, 320)], list(WORKS), 64, 3).cases())
    for row in runs:
        assert (
            row["examples_per_second"] > 0
            and 0 < row["cpu_ms_per_example"] < 1000
            and row["peak_bytes"] > 1e8
        )
    assert (tmp_path / "bench" / "bench.png").exists()


def test_input_compares_where_work_is_equal(tmp_path):
    cases = Inputs(tmp_path, 2, [(224, 224), (375, 500)], list(WORKS), 64, 3).cases()
    assert {case[1] for case in cases if case[0] == "224x224"} == {"resize"}, "it is only decoded"
    larger = {case[1:] for case in cases if case[0] == "375x500"}
    assert {case[:2] for case in larger if case[2] == "keras"} == {
        ("resize", "image_folder"),
        ("central-crop", "image_folder"),
    }
    formats = ("image_folder", "tfrecord", "parquet")
    assert larger >= {
        (work, kind, name) for work in WORKS for kind in formats for name in ("hvtrain", "by-hand")
    }


@nightly
@pytest.mark.parametrize("work", WORKS)
def test_input_gives_equal_pixels_for_equal_work(work, tmp_path):
    """Mean and contrast of each image agree; of random crops, those of all together."""
    folder = tmp_path / "300x400"
    write_images(folder, BATCH_SIZE, 300, 400)
    figures = {}
    for _, _, file_format, name in Inputs(tmp_path, 2, [(300, 400)], [work], BATCH_SIZE, 1).cases():
        images, _ = next(iter(PIPELINES[name](folder / file_format, file_format, work)))
        assert images.shape == (BATCH_SIZE, *TRAINED) and images.dtype == "float32"
        figures[file_format, name] = np.sort(
            [images.numpy().mean((1, 2, 3)), images.numpy().std((1, 2, 3))]
        )
    expected = figures["image_folder", "by-hand"]
    for case, actual in figures.items():
        if work == "random-crop":
            np.testing.assert_allclose(
                actual.mean(1), expected.mean(1), atol=0.02, err_msg=str(case)
            )
        else:
            np.testing.assert_allclose(actual, expected, atol=0.004, err_msg=str(case))


def test_bad_input_is_one_line(tmp_path):
    for arguments, text in (
        (["steps", "--contenders", "loop"], "--contenders loop is not one of hvtrain-mpi, "),
        (["steps", "--contenders", "keras@A"], "keras@A: A has no value; write keras@A=VALUE"),
        (["steps", "--rounds", "0"], "0 is not a whole number of at least 1"),
        (["steps", "--output", "/etc"], "--output /etc is not empty; choose another folder"),
        (
            ["steps", "--output", "/proc/x"],
            "--output /proc/x cannot be written: No such file or directory; choose",
        ),
        (
            ["steps", "--output", "/etc/hosts"],
            "--output /etc/hosts cannot be written: File exists; choose another folder",
        ),
        (["input", "--sizes", "224"], "224 is not a list of sizes such as 224x224,300x400"),
        (
            ["input", "--works", "crop"],
            "crop is not a list of some of resize,antialias,random-crop,central-crop",
        ),
        (
            ["scaling", "-np", "3,4"],
            "the global batch of 256 cannot be divided evenly among 3 ranks",
        ),
        (["scaling", "-np", "2,2"], "--ranks 2,2 names a number twice"),
        ([], "required: KIND"),
    ):
        code, output, errors = run_command("benchmarks", *arguments, cwd=tmp_path)
        assert (code, output) == (2, "") and text in errors and len(errors.splitlines()) == 1, (
            errors
        )


@nightly
def test_a_contender_that_fails_is_told_with_its_last_line(tmp_path):
    arguments = [
        "steps",
        "--contenders",
        "hvtrain-1@train.epoch=3",
        "--output",
        str(tmp_path / "bench"),
    ]
    code, output = run(None, 1, *BENCH, *arguments, cwd=tmp_path)
    assert (
        code == 75 and "hvtrain ended with [2] and 0 of 1 reports; its output is in " in output
    ), output
    assert "train.epoch" in output.splitlines()[-1]
