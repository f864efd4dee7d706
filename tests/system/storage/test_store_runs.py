"""Runs in object storage: the bits of the same run in a folder, on hosts that share no disk; complete or absent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvtrain.checkpoint.writer import Writer
from hvtrain.config.schema import CheckpointConfig
from hvtrain.errors import ConfigError, StorageError
from hvtrain.system.files import local_folder
from hvtrain.system.storage import cache
from hvtrain.system.storage.cache import local_copy
from hvtrain.system.storage.runs import Output, open_store
from hvtrain.training.finish import send_results
from hvtrain.watchdog.processes import resume_advice
from in_process import run_command
from launching import finish, kill, many_runs, start, train
from tiny_data import SHAPE, random_images, write_folder

CHECKPOINT = "checkpoints/step-0000000{step}/state"


@pytest.fixture
def begun(store, request):
    """A run with one checkpoint that was sent, and its folder."""
    name = re.sub(r"\W+", "-", request.node.name)
    store.send("PUT", "unit")
    run = open_store(f"s3://unit/{name}")
    run.folder.mkdir(parents=True)
    run.begin()
    write(run.folder, 1)
    run.send()
    return run


def write(folder: Path, step: int) -> None:
    """The state at a step, whose files all hold its number; of earlier ones the last stays."""
    for path in (folder / "checkpoints").glob("step-*"):
        if path.name != f"step-0000000{step - 1}":
            (path / "state").unlink()
            path.rmdir()
    for name in (
        CHECKPOINT.format(step=step),
        "checkpoints/best.json",
        "config.yaml",
        "history.csv",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{step}\n" * step)
    (folder / ".lock").touch()


def elsewhere(address: str, monkeypatch, folder: Path):
    """The same run on another host."""
    monkeypatch.setenv("HVTRAIN_CACHE", str(folder))
    cache.forget_copies()
    run = open_store(address)
    run.folder.mkdir(parents=True, exist_ok=True)
    return run


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("[!.]*") if path.is_file()}


def test_a_state_is_sent_whole_or_not_at_all(begun, store, monkeypatch, tmp_path):
    """A send that ends at any of its requests, as one of a process that is killed."""
    before = names(begun.folder)
    assert CHECKPOINT.format(step=1) in before
    count = 0
    is_sent = False
    while not is_sent:
        answers = iter([None] * count)

        def fault(request, answers=answers):
            return next(answers, 403) if request.method in ("PUT", "POST", "DELETE") else None

        write(begun.folder, 2)
        after = names(begun.folder)
        store.fault = fault
        try:
            begun.send()
            is_sent = True
        except StorageError:
            pass
        store.fault = lambda request: None
        monkeypatch.setenv("HVTRAIN_CACHE", str(tmp_path / f"reader{count}"))
        cache.forget_copies()
        seen = names(local_copy(begun.address))
        assert seen == after if is_sent else seen in (before, after)
        count += 1
    assert count > 10 and seen == after


def test_a_store_that_does_not_answer_is_one_that_cannot_be_written(begun, store):
    store.fault = lambda request: 403
    with pytest.raises(StorageError, match="cannot be accessed"):
        begun.send()
    store.fault = lambda request: None


def test_another_host_gets_the_newest_state_and_removes_what_is_gone(
    begun, store, monkeypatch, tmp_path
):
    # What is gone already is no fault: an object whose deletion had no answer, a file that a callback removes.
    store.filesystem().delete_file(f"{begun.address[5:]}/{CHECKPOINT.format(step=1)}")
    (begun.folder / "spare").touch()
    store.fault = lambda request: (begun.folder / "spare").unlink(missing_ok=True)
    for step in (2, 3):
        write(begun.folder, step)
        begun.send()
    other = elsewhere(begun.address, monkeypatch, tmp_path / "other")
    other.begin()
    assert names(other.folder) == names(begun.folder) and CHECKPOINT.format(step=1) not in names(
        other.folder
    )
    assert (other.folder / "history.csv").read_text() == "3\n" * 3

    # The start before it ends when it sends again, and changes nothing.
    write(begun.folder, 4)
    with pytest.raises(
        StorageError,
        match=rf"^{begun.address} was taken over by a later start on .* at .*; wait for that one to finish$",
    ):
        begun.send()
    write(other.folder, 4)
    write(other.folder, 5)
    other.send()
    # What is newer here than there stays, as after a kill before it was sent.
    write(other.folder, 6)
    again = elsewhere(begun.address, monkeypatch, tmp_path / "other")
    again.begin()
    assert CHECKPOINT.format(step=6) in names(again.folder)


def test_what_is_here_of_a_run_that_was_deleted_there_is_removed(
    begun, store, monkeypatch, tmp_path
):
    for item in store.filesystem().get_file_info(cache_selector(begun.address)):
        if item.is_file:
            store.filesystem().delete_file(item.path)
    begun._sent.clear()
    first_run = begun.run
    begun.begin()
    assert names(begun.folder) == set() and (begun.folder / ".lock").exists()
    # On other hosts too, where the search for the newest checkpoint would find it.
    other = elsewhere(begun.address, monkeypatch, tmp_path / "other")
    other.join(first_run)
    write(other.folder, 1)
    other.join(first_run)
    assert CHECKPOINT.format(step=1) in names(other.folder)
    other.join(begun.run)
    assert names(other.folder) == set()


def cache_selector(address: str):
    from pyarrow.fs import FileSelector

    return FileSelector(address.removeprefix("s3://"), recursive=True)


def test_objects_of_others_stay_and_their_address_is_refused(begun, store, monkeypatch, tmp_path):
    with store.filesystem().open_output_stream(f"{begun.address[5:]}/inner/data") as file:
        file.write(b"1")
    other = elsewhere(begun.address, monkeypatch, tmp_path / "other")
    other.begin()
    write(other.folder, 2)
    other.send()
    with store.filesystem().open_input_file(f"{begun.address[5:]}/inner/data") as file:
        assert file.read() == b"1"
    inner = elsewhere(f"{begun.address}/inner", monkeypatch, tmp_path / "inner")
    with pytest.raises(
        ConfigError,
        match=f"^run.dir={begun.address}/inner is not a run, and holds data; choose anot",
    ):
        inner.begin()


def test_advice_names_the_address_and_not_the_folder(begun, tmp_path):
    assert resume_advice(begun.folder).startswith(
        f"run the same command with run.dir={begun.address} to resume"
    )
    assert f"run.dir={tmp_path} to resume" in resume_advice(tmp_path)


def test_an_output_is_sent_whole_and_stays_here_if_it_cannot_be(begun, store):
    table = Output("s3://unit/table.csv", replaces=True)
    table.path.write_text("1")
    store.fault = lambda request: 403 if request.method in ("PUT", "POST") else None
    with pytest.raises(
        StorageError, match=r"cannot be accessed .*; the output is complete in \S+/table.csv$"
    ):
        table.send()
    assert table.path.read_text() == "1"
    store.fault = lambda request: None
    with pytest.raises(
        ConfigError, match=rf"^--output {begun.address} exists already; choose another address$"
    ):
        Output(begun.address)
    with pytest.raises(
        ConfigError, match=r"^--output s3://unit names no object; add a name to it$"
    ):
        Output("s3://unit", replaces=True)

    model = Output("s3://unit/models/digits")
    (model.path / "inner").mkdir(parents=True)
    for path in (
        model.path / "model",
        model.path / "inner/weights",
        model.path.with_suffix(".json"),
    ):
        path.write_text(path.name)
    store.requests.clear()
    folder = model.path.parent
    model.send()
    written = [request.path for request in store.requests if request.method in ("PUT", "POST")]
    assert written[-1].startswith("/unit/models/digits.json") and folder.is_dir()
    assert names(local_copy("s3://unit/models")) == {
        "digits/model",
        "digits/inner/weights",
        "digits.json",
    }
    del model
    assert not folder.exists()


def test_what_cannot_be_sent_is_one_line_and_ends_or_warns_as_a_full_disk(
    begun, store, caplog, monkeypatch
):
    write(begun.folder, 2)
    store.fault = lambda request: 403 if request.method in ("PUT", "POST") else None
    with pytest.raises(
        StorageError,
        match=rf"^{begun.address}/\S+ cannot be accessed \(ACCESS_DENIED.*check this host's",
    ):
        begun.send()
    for on_error in ("stop", "warn"):
        writer = Writer(
            begun.folder / "checkpoints", CheckpointConfig(on_error=on_error), send=begun.send
        )
        writer.submit(3, {"a": np.zeros(2)}, {"metrics": {}})
        error = writer.outcome()
        lines = [str(error)] if on_error == "stop" else caplog.messages
        assert re.search(
            r"cannot be accessed .*'s permissions[,;] (then start again|training continues)",
            lines[-1],
        )
        assert bool(error) == (on_error == "stop")
    # At the end of a run, too.
    run = SimpleNamespace(
        state=SimpleNamespace(store=begun),
        config=SimpleNamespace(checkpoint=CheckpointConfig()),
        folder=begun.folder,
    )
    with pytest.raises(StorageError, match="cannot be accessed"):
        send_results(run)
    run.config.checkpoint = CheckpointConfig(on_error="warn")
    send_results(run)
    assert f"; the results are in {begun.folder} on this host" in caplog.messages[-1]
    # Two starts never write to one run, whatever the setting.
    later = open_store(begun.address)
    later.folder.mkdir(parents=True, exist_ok=True)
    store.fault = lambda request: None
    later.begin()
    writer = Writer(
        begun.folder / "checkpoints", CheckpointConfig(on_error="warn"), send=begun.send
    )
    writer.send_missing()
    assert "was taken over by a later start" in str(writer.outcome())
    with pytest.raises(StorageError, match="was taken over by a later start"):
        send_results(run)
    # The folder here stands for the address.
    assert (
        open_store(str(begun.folder)).address == begun.address
        and open_store("runs/x").address == ""
    )
    monkeypatch.chdir(begun.folder)
    assert open_store(None).address == "", "without run.dir a new run begins, wherever that is"
    with pytest.raises(
        ConfigError,
        match=r"--output=s3://unit/x is an address, but it must be a folder on this host",
    ):
        local_folder("s3://unit/x", "--output")
    with pytest.raises(
        ConfigError, match=r"run.dir=file:///x is a folder of this host; give its path"
    ):
        open_store("file:///x")


@pytest.fixture(scope="module")
def trained(server, tmp_path_factory):
    """A run in a folder and one in a bucket, whose data is there too; the second part on a host with another disk."""
    folder = tmp_path_factory.mktemp("trained")
    for bucket in ("runs", "inputs"):
        server.bucket(bucket)
    for split, number in (("train", 24), ("validation", 9), ("test", 9)):
        write_folder(folder / "data" / split, *random_images(number))
    server.put(folder / "data", "inputs/pictures")
    settings = [
        "dataset=image_folder",
        f"dataset.image_shape={list(SHAPE)}".replace(" ", ""),
        "dataset.flip=true",
    ]
    settings += ["model=mlp", "train.batch_size=4", "checkpoint.keep=1", "run.report=true"]
    here = [*settings, f"dataset.dir={folder / 'data'}"]
    there = [*settings, "dataset.dir=s3://inputs/pictures"]
    parts = [
        {
            "local": [*here, "train.epochs=2"],
            "far": [*there, "train.epochs=2", "run.dir=s3://runs/far", "checkpoint.copies=1"],
            "nowhere": [*here, "run.dir=s3://no-such-bucket/run"],
            "nothing": [*settings, "dataset.dir=s3://inputs/none"],
        },
        {
            "local/2": [*here, "train.epochs=3"],
            "far/2": [*there, "train.epochs=3", "run.dir=s3://runs/far"],
            "weights": [*there, "train.epochs=1", "model.weights=s3://runs/far"],
        },
    ]
    results: dict = {}
    for number, runs in enumerate(parts):
        variables = {**server.environment, "HVTRAIN_CACHE": str(folder / f"host{number}")}
        variables["HVTRAIN_ENV"] = ",".join(server.environment)
        by_rank, output = many_runs("gloo", 2, runs, folder, **variables)
        results |= {name: [rank[name] for rank in by_rank] for name in runs}
    return folder, results, output


def arrays_of(checkpoints: Path) -> dict[str, np.ndarray]:
    return load_file(max(checkpoints.glob("step-*")) / "state.safetensors")


@pytest.mark.distributed
def test_two_ranks_train_the_same_bits_in_a_bucket_and_go_on_on_another_host(trained, store):
    folder, results, _ = trained
    for name in ("local", "far", "local/2", "far/2"):
        assert all("record" in rank for rank in results[name]), results[name]
    assert (
        results["far/2"][0]["record"]["first_step"]
        == results["local/2"][0]["record"]["first_step"]
        == 6
    )
    run = local_copy("s3://runs/far")
    local, far = arrays_of(folder / "local" / "checkpoints"), arrays_of(run / "checkpoints")
    assert local.keys() == far.keys() and all(np.array_equal(local[key], far[key]) for key in local)
    history = (folder / "local" / "history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in (run / "history.csv").read_text().splitlines()] == [
        line.split(",")[0] for line in history
    ]
    assert {"result.json", "model.keras", "best.keras", "report.html", "config.yaml"} <= names(run)
    assert not any(
        "hunter2" in path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()
    )


@pytest.mark.distributed
def test_an_address_that_cannot_be_used_is_one_line_on_all_ranks(trained):
    _, results, _ = trained
    for name, message in (
        (
            "nowhere",
            r"\w+Error: s3://no-such-bucket/run/\S+ does not exist; check the bucket and the path",
        ),
        ("nothing", "DataError: s3://inputs/none does not exist; check the bucket and the path"),
    ):
        assert [re.fullmatch(message, rank["error"]) is not None for rank in results[name]] == [
            True,
            True,
        ], results


@pytest.mark.distributed
def test_an_image_that_cannot_be_read_in_mid_run_ends_all_ranks_in_one_line(
    trained, server, tmp_path
):
    settings = [
        "dataset=image_folder",
        "dataset.dir=s3://inputs/pictures",
        "dataset.image_shape=[8,8,3]",
        "model=mlp",
    ]
    variables = {
        **server.environment,
        "HVTRAIN_CACHE": str(tmp_path),
        "HVTRAIN_ENV": ",".join(server.environment),
    }
    server.fault = lambda request: (
        # Not among those that are looked at before the run.
        403 if "/train/" in request.path and "0004.png" in request.path else None
    )
    code, output = train(
        "gloo", 2, *settings, "train.batch_size=4", "run.dir=run", cwd=tmp_path, **variables
    )
    server.fault = lambda request: None
    problem = "s3://inputs/pictures/train/class_1/0004.png cannot be accessed (ACCESS_DENIED"
    assert code == 2 and "Traceback" not in output, output
    (rank,) = re.findall(rf"hvtrain: rank (\d) on .*{re.escape(problem)}", output)
    assert re.search(rf"stopped because rank {rank} on .*{re.escape(problem)}", output), output


@pytest.mark.distributed
def test_a_finished_run_in_a_bucket_is_used_by_its_address(trained, store, tmp_path):
    folder, results, _ = trained
    assert "record" in results["weights"][0], results["weights"]
    figures = []
    for run in ("s3://runs/far", str(folder / "local")):
        output = tmp_path / f"{len(figures)}.json"
        done = run_command(
            "hvtrain", "evaluate", run, "split=test", f"--output={output}", cwd=tmp_path
        )
        assert done.code == 0, done
        figures.append(json.loads(output.read_text())["metrics"])
    assert figures[0] and figures[0] == figures[1]
    wrong = ["hvtrain", "evaluate", "s3://runs/far", "--output=s3://runs"]
    done = run_command(*wrong, cwd=tmp_path)
    assert done.code == 2 and "names no object" in done.errors, done
    assert "test examples" not in done.output, "refused only after the evaluation"
    for command, *options, name in (
        ("predict", "output.csv"),
        ("export", "format=keras", "model.keras"),
        ("export", "format=savedmodel", "saved"),
    ):
        address = f"s3://runs/outputs/{name}"
        done = run_command(
            "hvtrain", command, "s3://runs/far", *options, f"--output={address}", cwd=tmp_path
        )
        assert done.code == 0 and f"in {address}" in done.output, done
    sent = names(local_copy("s3://runs/outputs"))
    assert {"output.csv", "model.keras", "model.json", "saved.json", "saved/saved_model.pb"} <= sent
    rates = ["find_lr", "--steps=10", "model=mlp", "dataset=digits", "run.dir=s3://runs/rates"]
    done = run_command("hvtrain", *rates, cwd=tmp_path)
    assert {"range.csv", "range.png"} <= names(local_copy("s3://runs/rates")), done
    done = run_command("hvtrain", "report", "s3://runs/far", cwd=tmp_path)
    assert done.code == 0 and (tmp_path / "report.html").is_file(), done


@pytest.mark.nightly
@pytest.mark.distributed
def test_killed_runs_on_ever_new_hosts_end_with_the_same_bits(server, tmp_path):
    """Each start is killed at a random request that writes, and the next has an empty disk."""
    server.bucket("kills")
    settings = [
        "model=mlp",
        "dataset=digits",
        "train.epochs=4",
        "checkpoint.every_steps=7",
        "train.batch_size=64",
        "data.uneven=trim",
    ]
    code, output = train("gloo", 2, *settings, f"run.dir={tmp_path / 'whole'}", cwd=tmp_path)
    assert code == 0, output
    random = np.random.default_rng(0)
    writes_of_kills = [*random.integers(1, 60, 8).tolist(), 10**9]
    starts = []
    for number, last_write in enumerate(writes_of_kills):
        variables = {**server.environment, "HVTRAIN_CACHE": str(tmp_path / f"host{number}")}
        variables["HVTRAIN_ENV"] = ",".join(server.environment)
        command = [
            "python",
            "-m",
            "hvtrain",
            *settings,
            "run.dir=s3://kills/run",
            "run.report=false",
        ]
        process = start("gloo", 2, *command, cwd=tmp_path, **variables)
        writes = []

        def fault(request, process=process, writes=writes, last_write=last_write):
            if request.method in ("PUT", "POST"):
                writes.append(request)
                if len(writes) == last_write:
                    kill(process)

        server.fault = fault
        output = finish(process)
        starts += re.findall(r"resume\w* .*", output)
    server.fault = lambda request: None
    assert process.returncode == 0, output
    assert starts, output
    filesystem = server.filesystem()
    with filesystem.open_input_file("kills/run/model.keras") as far:
        assert far.size() > 0
    whole = arrays_of(tmp_path / "whole" / "checkpoints")
    last = arrays_of(
        next((tmp_path / f"host{len(writes_of_kills) - 1}" / "runs").iterdir()) / "checkpoints"
    )
    assert whole.keys() == last.keys() and all(
        np.array_equal(whole[key], last[key]) for key in whole
    )
