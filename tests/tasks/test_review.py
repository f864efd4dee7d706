"""What each task shows of predictions in a report, on examples with known outcomes."""

import base64
import io
import json
from dataclasses import asdict
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from PIL import Image

from hvtrain.data import from_arrays
from hvtrain.data.sources.table import Table
from hvtrain.strategies.base import Strategy
from hvtrain.tasks import (
    Binary,
    Classification,
    Custom,
    Language,
    Multilabel,
    Regression,
    Segmentation,
)
from hvtrain.tasks.examples import ReviewedExamples, as_bytes, png
from hvtrain.training.finish import _predict_some


def source(x, y, **facts):
    return from_arrays(x, y, x, y, name="known", facts=facts or None)


def reviewed(task, inputs, targets, outputs, model=None, **facts):
    examples = ReviewedExamples(inputs, targets, outputs, len(targets), "test", len(targets))
    figures = task.review(examples, model, source(inputs, targets, **facts))
    assert json.loads(json.dumps([asdict(figure) for figure in figures]))
    return figures


def one_hot(classes, number):
    return 4 * np.eye(number, dtype=np.float32)[classes]


def pixels(picture):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"))


def test_a_classifier_has_its_confusions_and_worst_images():
    targets, predicted = np.array([0, 1, 2, 2, 1]), [0, 1, 2, 0, 2]
    outputs = one_hot(predicted, 3)
    outputs[3, 0] = 9.0  # The most certain of the wrong ones.
    images = np.zeros((5, 4, 4, 1), np.float32)
    images[3, 0, 0] = 7.0
    matrix, worst = reviewed(Classification(), images, targets, outputs)
    assert matrix.counts == [[1, 0, 0], [0, 1, 1], [1, 0, 1]]
    assert matrix.note.startswith("60.0% of all 5 test examples are correct")
    assert [caption for _, caption in worst.pictures] == [
        "2, predicted 0 (100%)",
        "1, predicted 2 (96%)",
    ]
    assert pixels(worst.pictures[0][0])[0, 0].tolist() == [255, 255, 255]


def test_examples_are_of_all_classes_though_their_files_are_listed_class_by_class():
    inputs, targets = np.eye(9, 3, dtype=np.float32), np.repeat([0, 1, 2], 3)
    source = from_arrays(inputs, targets, inputs, targets)
    run = SimpleNamespace(
        source=source,
        task=SimpleNamespace(num_reviewed=3),
        plan=SimpleNamespace(batch_sizes=[8]),
        strategy=Strategy(),
    )
    examples = _predict_some(run, lambda inputs, training: inputs)
    assert (
        examples.targets.tolist() == [0, 1, 2] and examples.outputs.tolist() == inputs[::3].tolist()
    )
    assert examples.description == "3 of 9 test examples"
    outputs = one_hot([0, 2, 2], 3)
    _, worst = Classification().review(examples._replace(outputs=outputs), None, source)
    assert worst.rows[0][:3] == [3, "1", "2"], "the number in the split"


def test_many_classes_have_a_list_and_examples_that_are_no_images_a_table():
    targets = np.arange(30)
    outputs = one_hot([1, *range(1, 29), 4], 30)
    confusions, worst = reviewed(Classification(), np.zeros((30, 5), np.float32), targets, outputs)
    assert confusions.rows == [["0", "1", 1], ["29", "4", 1]]
    assert [row[:3] for row in worst.rows] == [[0, "0", "1"], [29, "29", "4"]]


def test_a_classifier_that_errs_nowhere_has_no_worst_examples():
    (matrix,) = reviewed(
        Classification(), np.zeros((2, 5), np.float32), np.array([0, 1]), one_hot([0, 1], 2)
    )
    assert matrix.counts == [[1, 0], [0, 1]]


def test_yes_or_no_is_a_matrix_of_two():
    targets, logits = np.array([0, 1, 1], np.float32), np.array([[-2.0], [3.0], [-1.0]], np.float32)
    matrix, worst = reviewed(Binary(), np.zeros((3, 5), np.float32), targets, logits)
    assert matrix.counts == [[1, 0], [1, 1]]
    assert worst.rows == [[2, "1", "0", "73%", "26.9%"]]


def test_labels_have_precision_and_recall():
    targets = np.array([[1, 0], [1, 1], [0, 0]], np.float32)
    outputs = np.array([[1, 1], [-1, 1], [1, -1]], np.float32)
    (table,) = reviewed(Multilabel(), np.zeros((3, 5), np.float32), targets, outputs)
    assert table.rows == [
        ["0", 2, "33.3%", "50.0%", "50.0%"],
        ["1", 1, "66.7%", "50.0%", "100.0%"],
    ]


def test_labels_are_shown_by_name():
    targets = np.array([[1, 0], [0, 1]], np.float32)
    inputs = np.zeros((2, 5), np.float32)
    (table,) = reviewed(Multilabel(), inputs, targets, targets, label_names=["even", "prime"])
    assert [row[0] for row in table.rows] == ["even", "prime"]


@pytest.mark.parametrize(
    ("target", "targets"), [("back", [0, 1, 0, 1]), ("cost", [5.0, 6.0, 5.5, 6.0])]
)
def test_rows_of_a_table_stand_with_their_values_and_their_number(target, targets, tmp_path):
    path = tmp_path / "visits.csv"
    path.write_text("age,place,back,cost\n1.5,a,no,5\n2.5,b,yes,6\n3.5,a,no,5.5\n4.5,b,yes,6\n")
    table = Table(str(path), target, drop=[*{"back", "cost"} - {target}], test_file=str(path))
    outputs = (
        one_hot(np.array([0, 1, 1, 1]), 2)
        if target == "back"
        else np.array([[5.0], [6.0], [9.0], [6.0]])
    )
    task = Classification() if target == "back" else Regression()
    examples = ReviewedExamples(
        np.zeros((4, 3), np.float32), np.array(targets), outputs, 4, "test", 4
    )
    worst = task.review(examples, None, table)[-1]
    assert worst.columns[-3:] == ["row of visits.csv", "age", "place"]
    assert worst.rows[0][-3:] == [2, "3.5", "a"], "the third row"


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 2)])
def test_regression_has_residuals(shape):
    targets = np.zeros(shape, np.float32)
    targets.reshape(4, -1)[:, 0] = [1, 2, 3, 4]
    outputs = np.array([[1.5], [2.0], [2.5], [4.0]], np.float32) * np.ones(
        (1, targets.reshape(4, -1).shape[1]), np.float32
    )
    pairs, residuals = reviewed(Regression(), np.zeros((4, 5), np.float32), targets, outputs)
    assert pairs.points == [(1.0, 1.5), (2.0, 2.0), (3.0, 2.5), (4.0, 4.0)]
    assert [error for _, error in residuals.points] == [0.5, 0.0, -0.5, 0.0]
    assert ("the first" in residuals.note) == (shape == (4, 2))


def test_segmentation_has_overlaps_and_masks_over_images():
    targets = np.zeros((2, 4, 4), np.int32)
    targets[:, :2] = 1
    targets[0, 0, 0] = 255  # Does not count.
    predicted = np.zeros((2, 4, 4), np.int64)
    predicted[1, :2] = 1
    images = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(np.float32)
    overlap, masks = reviewed(Segmentation(), images, targets, one_hot(predicted, 3), num_classes=3)
    assert overlap.rows == [["0", "0.696", 16], ["1", "0.533", 8], ["2", "does not occur", 0]]
    assert [caption for _, caption in masks.pictures] == [
        "example 0: mean IoU 0.27",
        "example 1: mean IoU 1.00",
    ]
    assert [name for name, _ in masks.legend] == ["1", "2"]
    worst = pixels(masks.pictures[0][0])
    assert worst.shape == (4, 3 * 4 + 2, 3)
    assert (worst[:, :4] == as_bytes(images[0])).all() and worst[0, 5].tolist() == [255, 255, 255]
    assert (worst[:, 10:] == as_bytes(images[0])).all(), "class 0 is not painted"


class Words:
    """A data set whose token i is the letter i."""

    def facts(self):
        return {}

    def text_of(self, tokens):
        return "".join(chr(97 + token) for token in tokens)


def test_language_has_texts_that_go_on():
    counting = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(26, 26)])
    counting.layers[0].set_weights([99 * np.roll(np.eye(26), 1, axis=1)])  # After a comes b.
    inputs = np.array([[0, 1, 2, 3]], np.int32)
    examples = ReviewedExamples(inputs, inputs + 1, one_hot(inputs + 1, 26), 1, "test", 1)
    (texts,) = Language().review(examples, counting, Words())
    assert texts.pairs == [("abcd", "efghijklmnopqrstuvwxyzabcdefghij")]


def test_language_has_hidden_tokens_that_are_filled_in():
    inputs, targets = np.array([[0, 25, 2, 25]], np.int32), np.array([[0, 1, 2, 3]], np.int32)
    examples = ReviewedExamples(
        inputs, targets, one_hot(np.array([[9, 1, 9, 4]]), 26), 1, "test", 1
    )
    (texts,) = Language().review(examples, None, Words())
    assert texts.pairs == [("azcz", "abce")]


def test_a_task_of_the_users_own_shows_nothing():
    assert Custom(keras.losses.MeanSquaredError()).num_reviewed == 0


def test_pictures_are_small_and_survive_constant_images():
    assert as_bytes(np.full((3, 3, 1), 5.0)).tolist() == np.zeros((3, 3, 3)).tolist()
    assert pixels(png(np.zeros((500, 250, 3), np.uint8))).shape == (192, 96, 3)
    side = np.zeros((500, 500, 3), np.uint8)
    assert pixels(png(side, side, side)).shape == (187, 576, 3), "with a gap of 20 between each two"


def test_a_label_with_the_name_of_another_labels_probability():
    source = SimpleNamespace(facts=lambda: {"label_names": ["a", "p.a"]})
    columns = Multilabel().columns(np.array([[-9.0, 9.0]]), source)
    assert {name: column.round() for name, column in columns.items()} == {
        "label.0": 0,
        "p.label.0": 0,
        "label.1": 1,
        "p.label.1": 1,
    }
