"""What predictions of each task look like as columns."""

import numpy as np
import pytest

from hvtrain.data.sources.digits import digits_traits
from hvtrain.predict.outputs import flat
from hvtrain.tasks import Binary, Multilabel, Regression

ODDS = np.log(3.0)  # The logit of a probability of 3/4.


def test_labels_have_their_names():
    rows = flat(Multilabel().columns(np.array([[ODDS, -ODDS, 0.1, -0.1]], np.float32), digits_traits()))
    assert {name: rows[name][0] for name in ("even", "prime", "above four", "with a loop")} == {
        "even": 1, "prime": 0, "above four": 1, "with a loop": 0,
    }  # fmt: skip
    assert rows["p.even"][0] == pytest.approx(0.75) and rows["p.prime"][0] == pytest.approx(0.25)


def test_one_of_two_has_the_probability_of_the_second():
    rows = flat(Binary().columns(np.array([[ODDS], [-ODDS]], np.float32), digits_traits()))
    assert rows["class"].tolist() == [1, 0] and rows["probability"] == pytest.approx([0.75, 0.25])


def test_numbers_are_taken_as_they_are():
    outputs = np.array([[1.0, 2.0]], np.float32)
    assert flat(Regression().columns(outputs, digits_traits())) == {"prediction.0": [1.0], "prediction.1": [2.0]}
    assert list(flat(Regression().columns({"price": outputs[:, :1]}, digits_traits()))) == ["price"]
