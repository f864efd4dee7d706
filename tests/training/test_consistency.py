"""Ranks whose code differs are told so before they train. What ranks gather is written down here."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.core.topology import Topology
from hvtrain.data.kinds import KINDS_FILE
from hvtrain.data.manifest import digest_of
from hvtrain.errors import DataError, RankError
from hvtrain.strategies.comm import Comm
from hvtrain.training.consistency import check_first_batches, check_same_run, software


class Gathers(Comm):
    """Rank 0 of two on hosts s1 and s2; the other one gathers what it is given."""

    def __init__(self, other):
        super().__init__()
        self.topology = Topology(0, 2)
        self.other = dict(zip(("settings", "programs"), other))

    def gather(self, value):
        if isinstance(value, str):
            return [value, digest_of(self.other)]
        return [(value[0], "s1"), (self.other, "s2")]


def test_ranks_with_other_code_are_told(tmp_path, monkeypatch):
    """Each of two ranks has its own version of the user's package."""
    config = from_dict(compose(["+callbacks.mine._target_=petals.Mine"]))
    digests = []
    for version in ("0", "1"):
        package = tmp_path / version / "petals"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"VERSION = {version}\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / version))
            digests.append(software(config))
            sys.modules.pop("petals", None)
    settings = config.flat
    monkeypatch.syspath_prepend(str(tmp_path / "0"))
    check_same_run(Gathers((settings, digests[0])), config)
    with pytest.raises(
        RankError, match="rank 0 on s1 and rank 1 on s2 have different programs: code of petals is "
    ):
        check_same_run(Gathers((settings, digests[1])), config)


class BothRead(Comm):
    """Rank 0 of two that have read the same."""

    def __init__(self):
        super().__init__()
        self.topology = Topology(0, 2)

    def gather(self, value):
        return [value, value]

    def broadcast(self, value, root=0):
        return value


@pytest.mark.parametrize("refuses", [True, False])
def test_equal_batches_may_be_meant_and_other_checks_stay(refuses, tmp_path):
    faults = [None]
    batch = tf.data.Dataset.from_tensors((np.zeros((2, 3), np.float32), np.zeros(2)))
    run = SimpleNamespace(
        strategy=SimpleNamespace(comm=BothRead()),
        source=SimpleNamespace(name="toys", same_on_all_ranks=False, raw_batches=False),
        stream_from=lambda step: batch,
        task=SimpleNamespace(fault=lambda targets, source: faults[0]),
        config=SimpleNamespace(guard=SimpleNamespace(batches=refuses, data=True)),
        folder=tmp_path,
    )
    if refuses:
        with pytest.raises(DataError, match="ranks 0 and 1 read the same first batch of toys"):
            check_first_batches(run, 0)
    else:
        check_first_batches(run, 0)
    assert (tmp_path / KINDS_FILE).is_file()
    faults[0] = (1, "is NaN")
    with pytest.raises(DataError, match="example 1 of rank 0's first batch from toys is NaN"):
        check_first_batches(run, 0)
