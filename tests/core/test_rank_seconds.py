"""ranks.csv: written, read again, of unlike numbers of ranks, damaged."""

import pytest

from hvtrain.system.run_files import RANKS_FILE, ranks_table, read_rank_seconds


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = {1: [0.25, 0.5], 2: [0.125], 3: [0.25, 0.5, 0.75]}
    ranks_table(tmp_path).save(list(rows.items()))
    assert (tmp_path / RANKS_FILE).read_text().splitlines()[:2] == [
        "epoch,rank_0,rank_1,rank_2",
        "1,0.25,0.5,",
    ]
    assert read_rank_seconds(tmp_path) == rows


@pytest.mark.parametrize("text", [None, "", "epoch,rank_0\none,2\n", "epoch,rank_0\n1,fast\n"])
def test_a_file_that_is_missing_or_damaged_has_no_rows(tmp_path, text):
    if text is not None:
        (tmp_path / RANKS_FILE).write_text(text)
    assert read_rank_seconds(tmp_path) == {}
