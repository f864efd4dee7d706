"""Ranks whose code differs are told so before they train. What ranks gather is written down here."""

import sys

import pytest

from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.core.topology import Topology
from hvtrain.data.manifest import digest_of
from hvtrain.errors import RankError
from hvtrain.strategies.comm import Comm
from hvtrain.training.consistency import check_same_run, software


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
