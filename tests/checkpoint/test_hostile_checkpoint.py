"""A run folder from someone who means harm: nothing in it is executed, and no link leads out of it."""

import ast
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import save

import hvtrain.keras as hvd
from hvtrain.checkpoint import store, writer
from hvtrain.config.compose import compose
from hvtrain.config.schema import CheckpointConfig, from_dict
from hvtrain.data.sources import keras_datasets
from hvtrain.data.sources.keras_datasets import cifar10, mnist
from hvtrain.errors import CheckpointError, ConfigError, DataError
from hvtrain.training import run_folder
from hvtrain.training.run import RunState
from launching import ROOT, train
from newest_checkpoint import META, newest

ARRAYS = {"model/0000/kernel": np.ones(3, np.float32)}


class Payload:
    """Unpickled, it makes the file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def put(folder, step, files):
    """A checkpoint of these files, with right sums over them."""
    path = folder / store.folder_name(step)
    path.mkdir(parents=True)
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()]
    for name, data in {**files, store.SUMS: "".join(lines).encode()}.items():
        (path / name).write_bytes(data)
    return path


def good(step, **meta):
    text = json.dumps({**META, "step": step, "bfloat16": [], **meta})
    return {store.ARRAYS: save(ARRAYS), store.META: text.encode()}


@pytest.fixture
def folder(tmp_path):
    """Checkpoints, of which the one of step 10 is good."""
    put(tmp_path / "run/checkpoints", 10, good(10))
    return tmp_path / "run/checkpoints"


@pytest.fixture
def outside(tmp_path):
    """What must stay as it is: a checkpoint, and a file."""
    path = tmp_path / "outside"
    put(path, 20, good(20))
    (path / "precious").write_text("of the user")
    return path


def is_untouched(outside):
    return (outside / "precious").read_text() == "of the user" and store.read(
        outside / "step-00000020"
    ).step == 20


def taken(folder):
    """The step that is taken, and why not the newest."""
    checkpoint, damaged = newest(folder)
    return checkpoint.step, " ".join(damaged)


@pytest.mark.parametrize("name", [store.ARRAYS, store.META])
def test_pickles_are_not_unpickled(name, folder, tmp_path):
    """Nor NumPy's arrays of objects, which are pickles."""
    marker, stream = tmp_path / "executed", io.BytesIO()
    np.savez(stream, kernel=np.array([Payload(marker)], object))
    for step, data in ((20, pickle.dumps(Payload(marker))), (30, stream.getvalue())):
        put(folder, step, {**good(step), name: data})
    assert taken(folder)[0] == 10
    assert not marker.exists()


def test_names_that_lead_elsewhere(folder, outside):
    """Only three names are read, whatever the list of sums and the best's name say."""
    path = put(folder, 20, {**good(20), "../../../outside/precious": b"of the harmful"})
    (path / store.META).unlink()
    (folder / "best.json").write_text(
        json.dumps({"step": "../../outside", "metric": "loss", "value": 0})
    )
    assert taken(folder)[0] == 10
    assert writer.read_best(folder) is None
    writer.prune(folder, CheckpointConfig(keep=1), 20)
    put(folder, 30, good("../../outside/step-00000020"))
    assert taken(folder)[0] == 10
    assert (outside / "precious").exists()


def test_a_checkpoint_that_is_a_link_is_refused_and_never_followed(folder, outside):
    (folder / "step-00000020").symlink_to(outside / "step-00000020")
    step, reason = taken(folder)
    assert step == 10
    assert (
        "step-00000020 is damaged: it is a symbolic link, and may lead out of the run folder"
        in reason
    )
    for name in (
        "step-00000020",
        "step-00000005",
        ".tmp-step-00000020",
        ".tmp-old-step-00000030",
        ".tmp-gone-x",
    ):
        (folder / name).symlink_to(outside)
    writer.prune(folder, CheckpointConfig(keep=1), 20)
    writer.write(folder, 20, ARRAYS, {})
    writer.mark_best(folder, 20, "loss", 0.5)
    writer.sweep(folder)
    assert not (folder / "step-00000020").is_symlink()
    assert is_untouched(outside)


@pytest.mark.parametrize("name", [store.ARRAYS, store.META, store.SUMS, store.TABLES])
@pytest.mark.parametrize("kind", ["link", "endless", "pipe"])
def test_files_that_are_none(name, kind, folder, outside):
    path = put(folder, 20, {store.TABLES: b"", **good(20)}) / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(outside / "step-00000020" / name if kind == "link" else "/dev/zero")
    step, reason = taken(folder)
    assert step == 10
    assert f"{name} is not a regular file" in reason


@pytest.mark.parametrize(
    "data",
    [
        (2**60).to_bytes(8, "little"),
        b"\x02\0\0\0\0\0\0\0{}"[:9],
        b"\x4f\0\0\0\0\0\0\0"
        + b'{"model/0000/t": {"dtype": "F32", "shape": [9999, 9], "data_offsets": [0, 36]}}',
    ],
)
def test_tables_that_are_not_what_their_header_says(data, folder):
    put(folder, 20, {**good(20), store.TABLES: data})
    step, reason = taken(folder)
    assert step == 10
    assert "step-00000020 is damaged" in reason


def test_folders_that_lead_out_of_the_run(tmp_path, outside):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(outside)
    config = from_dict(compose([f"run.dir={run}"]))
    with pytest.raises(
        ConfigError, match=r"checkpoints is a symbolic link, and may lead out of the run folder"
    ):
        run_folder.open_run_folder(config, RunState(0.0))
    assert is_untouched(outside)


def test_callbacks_get_numbers_and_the_name_of_their_metric_only():
    numbers = {"wait": 3, "best": 0.5, "model": 1, "__class__": 2, "monitor": "loss"}
    meta = {"callbacks": {"stop": numbers}}
    kept = {"wait": 3.0, "best": 0.5, "monitor": "loss"}
    assert store.Checkpoint(0, meta, {}).callbacks() == {"stop": kept}
    for wrong in (
        [1],
        {"stop": 3},
        {"stop": {"wait": "x"}},
        {"stop": {"wait": [1]}},
        {"stop": {"wait": 10**400}},
    ):
        with pytest.raises(CheckpointError, match="callback state is not made of numbers"):
            store.Checkpoint(0, {"callbacks": wrong}, {}).callbacks()


@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_a_model_with_code_in_it_is_refused(suffix, tmp_path):
    path, marker = tmp_path / f"model.{suffix}", tmp_path / "executed"

    def harm(x):
        return x

    harm.__code__ = compile(
        f"lambda x: __import__('os').system('touch {marker}')", "", "eval"
    ).co_consts[0]
    harm.__name__ = "<lambda>"
    layer = keras.layers.Lambda(lambda x: x, output_shape=(2,))
    model = keras.Sequential([keras.Input((2,)), layer])
    layer.function = harm
    model.compile("sgd", "mse")
    model.save(path)
    with pytest.raises(ValueError, match=r"(?i)lambda"):
        hvd.load_model(path)
    assert not marker.exists()
    if suffix == "keras":
        with suppress(Exception):
            keras.models.load_model(path, safe_mode=False)(np.ones((1, 2)))
        assert marker.exists(), "the model does harm where it is let"


def test_a_model_that_names_a_function_of_the_system(tmp_path):
    path, marker = tmp_path / "model.keras", tmp_path / "executed"
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(files["config.json"])
    config["config"]["layers"][1] = {
        "module": "os",
        "class_name": "system",
        "config": f"touch {marker}",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, "config.json": json.dumps(config).encode()}.items():
            archive.writestr(name, data)
    with pytest.raises((TypeError, ValueError)):
        hvd.load_model(path)
    assert not marker.exists()


@pytest.mark.parametrize("dataset", [cifar10, mnist])
def test_a_harmful_cache_of_keras(dataset, tmp_path, monkeypatch):
    """Keras knows the hash of what it unpickles, and unpacks that anew: other archives and pickles do nothing."""
    marker, datasets = tmp_path / "executed", tmp_path / "datasets"
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # Nothing can be fetched.
    monkeypatch.setattr("keras.src.backend.config._KERAS_DIR", str(tmp_path))
    payload = pickle.dumps(Payload(marker))
    unpacked = datasets / "cifar-10-batches-py-target" / "cifar-10-batches-py"
    unpacked.mkdir(parents=True)
    for batch in ("test_batch", *(f"data_batch_{number}" for number in range(1, 6))):
        (unpacked / batch).write_bytes(payload)
    with tarfile.open(datasets / "cifar-10-batches-py-target_archive", "w:gz") as archive:
        archive.add(unpacked, "cifar-10-batches-py")
        slip = tarfile.TarInfo("../../../../slipped")
        slip.size = 3
        archive.addfile(slip, io.BytesIO(b"out"))
    np.savez(
        datasets / "mnist.npz",
        **dict.fromkeys(["x_train", "y_train"], np.array([Payload(marker)], object)),
    )
    with pytest.raises(DataError, match="Keras could not read or fetch it"):
        dataset().num_examples("train")
    assert not marker.exists()
    assert not list(tmp_path.parent.rglob("slipped"))


def test_links_in_the_cache_of_keras_are_not_followed(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_text("data")
    monkeypatch.setattr(keras_datasets, "FALLBACK", tmp_path / "fallback")
    monkeypatch.setattr("os.access", lambda *_: False)
    (tmp_path / "fallback" / "datasets").mkdir(parents=True)
    (tmp_path / "fallback" / "datasets" / ".hvtrain.lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        mnist().num_examples("train")
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(
        DataError,
        match="fallback belongs to another user or is a link; set KERAS_HOME to a writable folder",
    ):
        mnist().num_examples("train")
    assert precious.read_text() == "data"


@pytest.mark.distributed
@pytest.mark.nightly
def test_a_run_in_a_hostile_folder(tmp_path, outside):
    """It goes on from the one good checkpoint, without a step outside."""
    run, marker = tmp_path / "run", tmp_path / "executed"
    folder = run / "checkpoints"
    code, output = train(
        None, 1, "train.epochs=1", "strategy=single", f"run.dir={run}", cwd=tmp_path
    )
    assert code == 0, output
    (path,) = store.list_checkpoints(folder)
    harmful = {"_target_": "os.system", "command": f"touch {marker}"}
    meta = json.loads((path / store.META).read_text())
    # Others would be refused.
    fixed = {name: meta["config"][name] for name in ("optimizer", "task", "seed")}
    meta["config"] = {
        **dict.fromkeys(meta["config"], harmful),
        "callbacks": {"x": harmful},
        **fixed,
    }
    meta["versions"], meta["changes"] = harmful, [harmful, 3]
    files = {
        store.ARRAYS: (path / store.ARRAYS).read_bytes(),
        store.META: json.dumps(meta).encode(),
    }
    writer.remove(path)
    put(folder, int(path.name[5:]), files)
    put(folder, 99, {**files, store.ARRAYS: pickle.dumps(Payload(marker))})
    (folder / "step-00000098").symlink_to(outside / "step-00000020")
    (run / ".tmp-model").symlink_to(outside)
    (run / ".tmp-config.yaml").symlink_to(outside / "precious")
    (run / "profile").symlink_to(outside)
    (run / ".tmp-history.csv").symlink_to(outside / "precious")
    (folder / ".tmp-gone-step-00000010").symlink_to(outside)
    for name in ("logs/rank-0000.log", "history.csv", "result.json", "model.keras", "model.json"):
        (run / name).unlink()
        (run / name).symlink_to(
            outside / "precious" if name.startswith("logs") else outside / "nothing"
        )
    code, output = train(
        None, 1, "train.epochs=2", "strategy=single", f"run.dir={run}", cwd=tmp_path
    )
    assert code == 0, output
    assert f"{path.name} is used instead (steps lost: {99 - 44})" in output
    assert "Traceback" not in output
    assert "rank 0 keeps no log file" in output
    assert not marker.exists()
    assert is_untouched(outside) and not (outside / "nothing").exists()
    assert (run / "model.keras").is_file() and not (run / "model.keras").is_symlink()
    arguments = [
        "strategy=single",
        f"run.dir={run}",
        "profile.timeline=true",
        "profile.first_step=1",
        "train.epochs=3",
    ]
    code, output = train(None, 1, *arguments, cwd=tmp_path)
    assert (
        code == 2
        and "profile is a symbolic link, and may lead out of the run folder; remove it" in output
    )
    assert is_untouched(outside)
    (run / "launch").symlink_to(outside)
    line = [sys.executable, "-m", "hvtrain", "launch", "-np", "2", "--", f"run.dir={run}"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 2
        and "launch is a symbolic link, and may lead out of the run folder" in done.stderr
    )
    assert list(run.rglob(".tmp-*")) == []


@pytest.mark.parametrize(
    "line",
    [
        ["hvtrain", "--config-dir", "{conf}", "model=harmful"],
        ["hvtrain", "--config-dir", "{conf}", "model=harmful", "model.tpyo=1"],
        ["hvtrain", "--config-dir", "{conf}", "--help"],
        ["hvtrain", "model=\"!!python/object/apply:os.system ['touch {marker}']\""],
        ["hvtrain", "launch", "cluster=harmful", "--", "--config-dir", "{conf}"],
    ],
    ids=["config", "misspelt", "help", "word", "cluster"],
)
def test_yaml_is_data(line, tmp_path):
    """Tags that would make objects are refused in one line."""
    marker = tmp_path / "executed"
    for group in ("model", "cluster"):
        (tmp_path / "conf" / group).mkdir(parents=True)
        tag = f"!!python/object/apply:os.system ['touch {marker}']"
        (tmp_path / "conf" / group / "harmful.yaml").write_text(f"# Harm\nkind: {tag}\n")
    arguments = [argument.format(conf=tmp_path / "conf", marker=marker) for argument in line]
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not marker.exists()
    if "--help" not in arguments:
        assert done.returncode == 2
        assert done.stderr.startswith("hvtrain: ") and done.stderr.count("\n") == 1, done.stderr


def test_the_code_has_nothing_that_unpickles_or_unpacks():
    """What reads files of others is TensorFlow, Keras in its safe mode, NumPy without pickles, JSON and safe YAML."""
    harmful = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "tarfile", "zipfile"}
    calls = {
        *(
            "np.load",
            "yaml.load",
            "yaml.unsafe_load",
            "yaml.full_load",
            "eval",
            "shutil.unpack_archive",
        ),
        *("keras.config.enable_unsafe_deserialization", "keras.layers.Lambda"),
    }
    offenders = []
    # What narrows the unpickling of Horovod's own launcher has to name it. A notebook's function goes to its own ranks
    # in a file that is refused if another user could have written it (tests/launch).
    known = {ROOT / "hvtrain" / "launch" / name for name in ("horovod_changes.py", "notebook.py")}
    # A table in a zip file is read from memory, and the members of a tar file by their offsets: nothing is unpacked.
    known |= {
        ROOT / "hvtrain" / "data" / "formats" / name for name in ("tables.py", "tar_files.py")
    }
    for path in set((ROOT / "hvtrain").rglob("*.py")) - known:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in calls or harmful & {
                name.partition(".")[0] for name in [*names, getattr(node, "module", "") or ""]
            }:
                offenders.append(f"{path.relative_to(Path(ROOT))}:{node.lineno}")
    assert offenders == []
