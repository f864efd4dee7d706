"""The examples train on two ranks, and go on from their checkpoints."""

import json

import pytest

from launching import ROOT, WORKERS, run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

OWN_LOOP, GRAPH = (
    str(ROOT / f"examples/{name}.py") for name in ("own_loop", "tf1_monitored_session")
)
# In this order: the second of each pair goes on where the first stopped.
STARTS = [f"{OWN_LOOP} --epochs 2", OWN_LOOP, f"{GRAPH} --steps 100", GRAPH]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    arguments = [str(WORKERS / "scripts.py"), str(folder / "found.json"), *STARTS]
    code, output = run("mpirun", 2, "python", *arguments, cwd=folder)
    assert code == 0, output
    return json.loads((folder / "found.json").read_text()), output, folder


@pytest.mark.parametrize(
    ("start", "accuracy"), list(zip(STARTS, (0.5, 0.95, 0.5, 0.93))), ids=range(4)
)
def test_an_example_trains_with_equal_weights(started, start, accuracy):
    for result in started[0]:
        assert result[start].get("error") is None
        assert result[start]["gap"] == 0
        assert result[start]["accuracy"] > accuracy


def test_the_second_start_goes_on_from_the_checkpoint_of_rank_0(started):
    _, output, folder = started
    epochs = [line.split(":")[0] for line in output.splitlines() if line.startswith("epoch ")]
    assert epochs == [f"epoch {number}" for number in range(1, 13)], "each once, by rank 0"
    assert {path.name for path in folder.iterdir()} >= {"own-loop", "tf1-monitored-session"}
    steps = [path.name for path in (folder / "tf1-monitored-session").glob("*.index")]
    assert "model.ckpt-50.index" in steps and "model.ckpt-400.index" in steps
