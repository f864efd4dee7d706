"""The newest numbers of a run in Prometheus's text format: at a port, in a file, and on the dashboard."""

import json
import math
import re
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launching import ROOT, many_runs

FETCHES = """
import time
import urllib.request

import hvtrain.keras as hvd
import keras


class Fetch(keras.callbacks.Callback):
    def __init__(self, address, page):
        super().__init__()
        self.address, self.page = address, page

    def on_epoch_begin(self, epoch, logs=None):
        if hvd.rank() == 0 and epoch == 2:
            with urllib.request.urlopen(self.address) as answer, open(self.page, "wb") as file:
                file.write(answer.read())
"""


def samples(text):
    """{name: {labels without the run's: value}} of a page."""
    families = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "run"}
            assert sample.labels["run"] == "served"
            families.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return families


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, what ranks saw, output, ports): one run is fetched after two epochs, and two are refused."""
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "fetches.py").write_text(FETCHES)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        ports = [listener.getsockname()[1] for listener in (taken, free)]
        free.close()
        fetch = [
            "+callbacks.fetch._target_=fetches.Fetch",
            f"+callbacks.fetch.address=http://127.0.0.1:{ports[1]}/metrics",
            f"+callbacks.fetch.page={folder}/page",
        ]
        settings = {
            "served": [
                "train.epochs=3",
                f"metrics.port={ports[1]}",
                f"metrics.file={folder}/run.prom",
                *fetch,
            ],
            "served/again": ["train.epochs=4"],
            "taken": [f"metrics.port={ports[0]}"],
            "high": ["metrics.port=70000"],
            "nowhere": ["metrics.file=/no/such/folder/run.prom"],
        }
        results, output = many_runs(
            "mpirun", 2, settings, folder, timeout=90, PYTHONPATH=f"{ROOT}:{folder}"
        )
    return folder, results, output, ports


def test_the_numbers_are_those_of_the_run(runs):
    folder, results, output, _ = runs
    assert all("record" in rank["served"] for rank in results), output
    page = samples((folder / "page").read_text())
    file = samples((folder / "run.prom").read_text())
    assert page.keys() == file.keys()
    record = results[0]["served"]["record"]
    steps = record["num_steps"]
    assert [families["hvtrain_step"][()] for families in (page, file)] == [steps * 2 / 3, steps]
    assert page["hvtrain_planned_steps"] == {(): steps} and page["hvtrain_restarts"] == {(): 0}
    assert file["hvtrain_checkpoint_step"] == {(): steps}, "the last one has been waited for"
    assert (
        file["hvtrain_last_step_timestamp_seconds"][()]
        <= file["hvtrain_checkpoint_timestamp_seconds"][()]
    )
    history = (folder / "served" / "history.csv").read_text().splitlines()
    rows = [dict(zip(history[0].split(","), line.split(","))) for line in history[1:]]
    for families, row in ((page, rows[1]), (file, rows[2])):
        assert families["hvtrain_metric"][(("name", "loss"),)] == pytest.approx(float(row["loss"]))
        assert families["hvtrain_examples_per_second"][()] == pytest.approx(
            float(row["examples_per_second"]), abs=0.1
        )
        assert families["hvtrain_gradient_norm"][()] == pytest.approx(
            float(row["gradient_norm"]), rel=1e-5
        )
        flops = families["hvtrain_model_flops"][()] / families["hvtrain_examples_per_second"][()]
        assert flops == pytest.approx(
            float(row["flops_per_second"]) / float(row["examples_per_second"]), rel=1e-3
        )
        assert math.isnan(families["hvtrain_peak_share"][()]) and "share_of_peak" not in row, (
            "of a CPU"
        )
    assert list(file["hvtrain_rank_step_seconds"]) == [(("rank", "0"),), (("rank", "1"),)]
    phases = {
        labels[0][1]: seconds for labels, seconds in file["hvtrain_phase_seconds_total"].items()
    }
    assert min(phases.values()) > 0 and list(phases) == ["data", "compute", "communication"]
    assert file["hvtrain_sent_bytes_per_step"] == {(): record["proof"]["sent_bytes"]} != {(): 0}
    assert file["hvtrain_memory_bytes"][(("kind", "process"),)] > 1e8


def test_goodput_counts_the_time_of_all_starts(runs):
    """What was lost between them too; and the metrics have the same parts."""
    folder, results, output, _ = runs
    first, again = (results[0][name]["record"]["goodput"] for name in ("served", "served/again"))
    for goodput in (first, again):
        parts = {name: seconds for name, seconds in goodput.items() if name not in ("share", "all")}
        assert sum(parts.values()) == pytest.approx(goodput["all"])
        assert goodput["share"] == goodput["steps"] / goodput["all"] > 0
        assert min(parts.values()) >= 0
    assert first["restarts"] == 0 < again["restarts"]
    assert first["repeated"] == 0 <= again["repeated"] < again["restarts"]
    assert all(again[part] > first[part] for part in ("steps", "start", "checkpoints", "all"))
    assert again["all"] > first["all"] + again["restarts"]
    words = r"goodput: \d+% of [\d.]+ s went into steps; .*start \d+%"
    assert len(re.findall(words, output)) == 2, output
    file = samples((folder / "run.prom").read_text())
    assert {labels[0][1] for labels in file["hvtrain_goodput_seconds"]} == parts.keys()


def test_the_port_is_closed_after_training(runs):
    *_, ports = runs
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[1]))


def test_what_is_taken_or_not_there_is_one_line_on_all_ranks(runs):
    folder, results, output, ports = runs
    messages = {
        "taken": f"metrics.port={ports[0]} at metrics.address=127.0.0.1 cannot be used: Address already in use; choose "
        "another",
        "high": "metrics.port=70000 at metrics.address=127.0.0.1 cannot be used: bind(): port must be 0-65535.; "
        "choose another",
        "nowhere": "metrics.file=/no/such/folder/run.prom cannot be used: No such file or directory; choose another",
    }
    for name, message in messages.items():
        assert {rank[name].get("error") for rank in results} == {f"ConfigError: {message}"}, output
        assert not (folder / name / "starts.json").exists()


def test_each_query_of_the_dashboard_has_its_numbers_in_the_output(runs):
    folder, *_ = runs
    families = samples((folder / "run.prom").read_text())
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    shown = set()
    for target in targets:
        names = re.findall(r"hvtrain_\w+", target["expr"])
        assert names and families.keys() >= set(names), target
        labels = {key for labels in families[names[0]] for key, _ in labels}
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == {"run", *labels}, target
        shown.update(names)
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = "".join(line for line in page.splitlines() if line.startswith("| `"))
    assert families.keys() == set(re.findall(r"hvtrain_\w+", rows))
    assert families.keys() - shown == {"hvtrain_epoch", "hvtrain_checkpoint_step"}
