"""Trackers get what two ranks record, go on when the run does, and never stop it."""

import csv
import json
import struct
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError
from hvtrain.strategies.comm import Comm
from hvtrain.system.files import write_json
from hvtrain.system.run_files import TRACKERS_FILE, EpochRecord, read_tracked
from hvtrain.training.callbacks.publishing import Tracking
from hvtrain.training.find_checkpoint import read_records
from hvtrain.training.trackers import MLflow, TensorBoard, TrackedRun, WeightsAndBiases
from launching import many_runs

MODULES = ("tensorboard", "mlflow", "sqlalchemy", "alembic", "sqlparse", "wandb")
needs_trackers = pytest.mark.skipif(
    not all(map(find_spec, MODULES)),
    reason="tensorboard, mlflow and wandb (scripts/lock/trackers.txt) are missing",
)
ALL = "tracker=[tensorboard,mlflow,wandb]"
STEPS = [10, 20, 30]
TRACKED = {"loss", "accuracy", "val_loss", "val_accuracy", "epoch", "learning_rate", "examples_per_second",
           "gradient_norm", "flops_per_second", "step_seconds/rank_0", "step_seconds/rank_1"}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trackers")


@pytest.fixture(scope="module")
def ran(folder):
    """(what each rank saw of each run, all output), in one start of two ranks."""
    settings = ["dataset.num_validation=80", "train.batch_size=16"]
    runs = {
        "all": [*settings, "tracker=[tensorboard,mlflow]", "train.epochs=1"],
        "all/resumed": [*settings, ALL, "train.epochs=2"],
        "all/resumed again": [*settings, ALL, "train.epochs=3", "run.report=true"],
        "broken": [
            *settings,
            ALL,
            "train.epochs=3",
            "tracker.tensorboard.dir=/proc/nowhere",
            "tracker.mlflow.uri=http://me:hunter2@127.0.0.1:9",
        ],
        "unnoted": [*settings, "tracker=tensorboard", "train.epochs=1"],
        "missing": ["+tracker.own._target_=leaves.Needy"],
    }
    (folder / "unnoted" / TRACKERS_FILE).mkdir(parents=True)
    return many_runs(
        "mpi", 2, runs, folder, MLFLOW_TRACKING_URI="", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"
    )


def history(run):
    with (run / "history.csv").open() as stream:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(stream)}


def events(run):
    """{tag: {step: value}} of all event files in a run folder, where no step of a tag may come twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    accumulator.Reload()
    tags = {tag: accumulator.Tensors(tag) for tag in accumulator.Tags()["tensors"]}
    assert all(len({event.step for event in each}) == len(each) for each in tags.values())
    return {
        tag: {event.step: make_ndarray(event.tensor_proto).item() for event in each}
        for tag, each in tags.items()
    }


def wandb_records(path):
    """The records in an offline file of Weights & Biases: LevelDB's log format, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # A whole record, or the last part of one.
            record, whole = Record.FromString(whole), b""
            yield record


def wandb_run(run):
    """(ids, rows of the history in their order, files, values of the configuration) of all its offline files."""
    ids, rows, files, settings = [], [], [], {}
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.append(record.run.run_id)
                settings = {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            elif record.HasField("history"):
                rows.append(
                    {
                        item.nested_key[0]: json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
            files += [item.path for item in record.files.files]
    return ids, rows, files, settings


@pytest.mark.nightly
@pytest.mark.distributed
@needs_trackers
def test_tensorboard_has_every_epoch_of_a_resumed_run_once(ran, folder):
    tags = events(folder / "all")
    assert set(tags) == {*TRACKED, "test_loss", "test_accuracy", "settings"}
    assert [*tags["val_loss"]] == STEPS and tags["loss"] == pytest.approx(history(folder / "all"))
    assert "num_validation: 80" in tags["settings"][0].decode()
    assert tags["test_accuracy"][30] == pytest.approx(
        ran[0][0]["all/resumed again"]["record"]["metrics"]["test_accuracy"]
    )


@pytest.mark.nightly
@pytest.mark.distributed
@needs_trackers
def test_mlflow_goes_on_in_the_same_run(ran, folder):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("hvtrain")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "all"
    assert set(run.data.metrics) == {*TRACKED, "test_loss", "test_accuracy"}
    losses = {
        metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")
    }
    assert losses == pytest.approx(history(folder / "all"))
    assert (
        run.data.params["dataset.num_validation"] == "80" and run.data.params["train.epochs"] == "1"
    )
    changes = [change["changed"]["train.epochs"] for change in json.loads(run.data.tags["changes"])]
    assert changes == [[1, 2], [2, 3]]
    files = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "result.json", "report.html", "curves.png", "best.keras"}


@pytest.mark.nightly
@pytest.mark.distributed
@needs_trackers
def test_weights_and_biases_goes_on_under_the_same_id(ran, folder):
    """Chosen at the first resume, it gets the epoch before, too."""
    ids, rows, files, settings = wandb_run(folder / "all")
    assert len(ids) == 2 and len(set(ids)) == 1
    assert {row["_step"]: row["loss"] for row in rows} == pytest.approx(history(folder / "all"))
    assert set(rows[0]) >= TRACKED and "test_accuracy" in rows[-1]
    assert settings["train"]["epochs"] == 3
    assert {"config.yaml", "result.json", "report.html", "curves.png", "best.keras"} <= set(files)


@pytest.mark.nightly
@pytest.mark.distributed
@needs_trackers
def test_a_tracker_that_fails_warns_once_and_the_run_ends_well(ran, folder):
    results, output = ran
    assert {seen["broken"]["record"]["num_steps"] for seen in results} == {30}
    lines = [
        line
        for line in output.splitlines()
        if " failed: " in line and line.endswith("; the run continues without it")
    ]
    assert len(lines) == 2
    assert "tracker.tensorboard failed: " in lines[0] and "/proc/nowhere" in lines[0]
    assert "tracker.mlflow failed: " in lines[1]
    assert [row["_step"] for row in wandb_run(folder / "broken")[1]] == STEPS


@pytest.mark.nightly
@pytest.mark.distributed
@needs_trackers
def test_a_run_that_cannot_note_its_trackers_goes_on_without_them(ran):
    results, output = ran
    assert results[0]["unnoted"]["record"]["num_steps"] == 10
    assert (
        output.count("trackers.json was not written: ")
        == output.count("the run continues without its trackers")
        == 1
    )


@pytest.mark.nightly
@pytest.mark.distributed
@needs_trackers
def test_a_password_in_an_address_reaches_no_record(ran, folder):
    assert "hunter2" not in ran[1]
    files = [path for path in (folder / "broken").rglob("*") if path.is_file()]
    assert {"config.yaml", "result.json", "starts.json"} <= {path.name for path in files}
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
    settings = json.loads((folder / "broken" / "result.json").read_text())["config"]
    assert settings["tracker"]["mlflow"]["uri"].startswith("http://***@")


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_missing_package_is_refused_before_training(ran):
    """On all ranks, though rank 0 alone would use it."""
    assert {seen["missing"]["error"] for seen in ran[0]} == {
        "ConfigError: tracker=own needs modules that are not installed: no_such_module, nor_this; "
        "install: ./scripts/run uv pip install --no-deps -r scripts/lock/trackers.txt"
    }


@pytest.mark.nightly
@needs_trackers
def test_a_run_that_stops_or_fails_is_ended_as_such(tmp_path, monkeypatch):
    """And goes on in the same tracked run; in another one if that has been deleted."""
    monkeypatch.chdir(tmp_path)
    mlflow, wandb = MLflow(f"sqlite:///{tmp_path / 'mlflow.db'}"), WeightsAndBiases(str(tmp_path))
    run = TrackedRun("some", tmp_path, {"seed": 1}, [])
    known: dict[str, str | None] = {"mlflow": None, "wandb": None}
    for state, status in [("stopped", "KILLED"), ("failed", "FAILED"), ("finished", "FINISHED")]:
        # Offline, wandb names a folder by its second, and would reuse it.
        time.sleep(1 - time.time() % 1)
        for name, tracker in [("mlflow", mlflow), ("wandb", wandb)]:
            tracked_id = tracker.start(run, known[name])
            assert known[name] in (None, tracked_id)
            known[name] = tracked_id
            tracker.finish(state, [])
        assert mlflow._client.get_run(known["mlflow"]).info.status == status
    # By the second in their names: wandb's own process may write to a file of an earlier run last.
    paths = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    deadline = time.monotonic() + 60
    while True:
        records = [list(wandb_records(path)) for path in paths]
        codes = [
            record.exit.exit_code for each in records for record in each if record.HasField("exit")
        ]
        # That process may write the last record after finish() has returned.
        if len(codes) == 3 or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert codes == [1, 1, 0]
    assert [any(record.HasField("preempting") for record in each) for each in records] == [
        True,
        False,
        False,
    ]
    mlflow._client.delete_run(known["mlflow"])
    assert mlflow.start(run, known["mlflow"]) != known["mlflow"]
    assert mlflow.start(run, "0" * 32) != known["mlflow"]


def test_tensorboard_knows_a_run_whose_folder_was_moved(tmp_path):
    pytest.importorskip("tensorboard")
    here = tmp_path / "here"
    there = tmp_path / "there"
    known = None
    for folder in (here, there):
        tracker = TensorBoard(str(folder / "tensorboard"))
        known = tracker.start(TrackedRun(folder.name, folder, {"seed": 1}, []), known)
        tracker.finish("stopped", [])
        if folder == here:
            here.rename(there)
    assert list(events(there)["settings"]) == [0]


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(
        ConfigError, match=r"^tracker\.wandb\.mode=disabled is not one of offline, online$"
    ):
        WeightsAndBiases("runs", mode="disabled")


def test_ids_move_with_the_other_records_of_a_run(tmp_path):
    """To a host that has none of them; without a tracker there is no file."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    assert read_records(here) == {}
    write_json(here / TRACKERS_FILE, {"mlflow": {"id": "8f", "step": 20}})
    (there / TRACKERS_FILE).write_bytes(read_records(here)[TRACKERS_FILE])
    assert read_tracked(there) == {"mlflow": {"id": "8f", "step": 20}}
    (there / TRACKERS_FILE).write_text('{"mlflow": {"id": 3}}')
    assert read_tracked(there) == {}, "it is damaged"


def test_a_tracker_gets_the_epochs_that_a_run_trains_again(tmp_path):
    """With other settings than before, for example, or with other numbers of steps."""
    write_json(tmp_path / TRACKERS_FILE, {"mine": {"id": "8f", "step": 80}})
    sent = []
    mine = SimpleNamespace(
        start=lambda facts, tracked_id: tracked_id, scalars=lambda step, values: sent.append(step)
    )
    records = [EpochRecord(at, 10 * at, 0.1, 1.0, 1.0, {"loss": 1.0}) for at in range(1, 7)]
    report = SimpleNamespace(records=records, rank_seconds={})
    run = SimpleNamespace(
        folder=tmp_path,
        config=SimpleNamespace(tracker={}, record={}),
        meta={"changes": {}},
        strategy=SimpleNamespace(comm=Comm()),
        plan=None,
        topology=Topology(),
    )
    position = SimpleNamespace(start_step=50)
    tracking = Tracking(SimpleNamespace(run=run, position=position, weights=None, report=report))
    tracking._trackers["mine"] = mine
    tracking.on_train_begin()
    assert sent == [60], "behind the 50 steps from which the run goes on"
