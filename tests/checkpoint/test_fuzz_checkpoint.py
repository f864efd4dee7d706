"""Whatever is in a checkpoint's files: a whole one is read, or it is named as damaged and the one before is taken."""

import hashlib
import json
import re
import tempfile
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvtrain.checkpoint import store, writer
from hvtrain.errors import CheckpointError
from newest_checkpoint import META, newest

# The same examples in each run, so that a failure is of the code; no deadline, the machine may be busy.
FIXED = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
FILES = (store.ARRAYS, store.META, store.SUMS)


def arrays(step):
    return {
        "model/0000/kernel": np.full((3, 4), step, np.float32),
        "model/0001/half": np.full(5, step, ml_dtypes.bfloat16),
        "optimizer/0000/iterations": np.array(step),
        "rank/0/seed/0000": np.arange(2, dtype=np.uint32),
    }


@cache
def whole(step):
    """The files of a whole checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = writer.write(
            Path(folder), step, arrays(step), {**META, "metrics": {"loss": 0.5}, "callbacks": {}}
        )
        return {name: (path / name).read_bytes() for name in FILES}


def put(folder, step, files):
    path = folder / store.folder_name(step)
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name).write_bytes(data)


def with_right_sums(files):
    lines = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in FILES[:2]]
    return {**files, store.SUMS: "".join(lines).encode()}


def read_beside_a_whole_one(files):
    """What is taken where these files are those of step 20, and the checkpoint of step 10 is whole."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        put(folder, 10, whole(10))
        put(folder, 20, files)
        try:
            checkpoint, damaged = newest(folder)
        except CheckpointError as error:
            # Complete, with right sums, and of no run.
            assert re.match(
                r"checkpoint step-00000020 lacks [\w, ]+ and cannot be resumed", str(error)
            )
            return store.read(folder / "step-00000020")
        assert store.read(folder / "step-00000010").step == 10, "it is still there"
        if checkpoint.step == 10:
            (line,) = damaged
            assert line.startswith("checkpoint step-00000020 is damaged: "), line
            assert line.endswith("step-00000010 is used instead (steps lost: 10)"), line
            assert "\n" not in line
            assert (folder / "damaged-step-00000020").is_dir()
        else:
            assert damaged == []
        return checkpoint


def mutated(data, draw):
    """Bytes with some flipped, cut out or put in."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "cut", "end", "put", "empty"]))
        more = draw(st.binary(min_size=1, max_size=9))
        if kind == "flip" and data:
            data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + draw(st.integers(1, 40)) :]
        else:
            data = {"end": data[:at], "put": data[:at] + more + data[at:]}.get(kind, b"")
    return data


@settings(FIXED, max_examples=150)
@given(st.data())
def test_any_damage_is_noticed_and_nothing_else_raised(data):
    name = data.draw(st.sampled_from(FILES))
    files = {**whole(20), name: mutated(whole(20)[name], data.draw)}
    checkpoint = read_beside_a_whole_one(files)
    if checkpoint.step == 20:
        assert files[store.ARRAYS] == whole(20)[store.ARRAYS], "the sums let no change through"
        assert files[store.META] == whole(20)[store.META]


@settings(FIXED, max_examples=250)
@given(st.data())
def test_right_sums_over_anything(data):
    name = data.draw(st.sampled_from(FILES[:2]))
    content = data.draw(st.sampled_from(["mutated", "mutated", "random"]))
    changed = (
        mutated(whole(20)[name], data.draw)
        if content == "mutated"
        else data.draw(st.binary(max_size=60))
    )
    checkpoint = read_beside_a_whole_one(with_right_sums({**whole(20), name: changed}))
    assert isinstance(checkpoint.meta, dict)
    assert all(isinstance(array, np.ndarray) for array in checkpoint.arrays.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
)


@settings(FIXED, max_examples=150)
@given(st.sampled_from(["step", "bfloat16", "metrics", None]), json_values)
def test_any_json_in_meta(key, value):
    meta = {**json.loads(whole(20)[store.META]), key: value} if key else value
    files = {**whole(20), store.META: json.dumps(meta).encode()}
    checkpoint = read_beside_a_whole_one(with_right_sums(files))
    assert checkpoint.step == 10 or key == "metrics" or meta["step"] == 20


def header(tree, length=None):
    text = json.dumps(tree).encode() if not isinstance(tree, bytes) else tree
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def test_headers_that_lie():
    """Sizes far beyond the file, holes, overlaps, types that are none: no memory is taken for them."""
    huge = {"a": {"dtype": "F32", "shape": [2**31, 2**31], "data_offsets": [0, 2**64 - 4]}}
    overflow = {"a": {"dtype": "F32", "shape": [2**63, 4], "data_offsets": [0, 0]}}
    for data in (
        header(huge),
        header(overflow),
        header({}, length=2**60),
        header({}, length=2**64 - 1),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}) + b"\0" * 8,
        header({"a": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header(b"[" * 100_000),
    ):
        assert (
            read_beside_a_whole_one(with_right_sums({**whole(20), store.ARRAYS: data})).step == 10
        )
    deep = b"[" * 100_000 + b"]" * 100_000
    assert read_beside_a_whole_one(with_right_sums({**whole(20), store.META: deep})).step == 10
