"""A classifier's figures in the report: its confusions and its worst errors."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hvtrain.core.figures import Figure, Matrix, Pictures, Table
from hvtrain.tasks.reviewed import Reviewed, as_bytes, png

MOST_CLASSES = 20  # In a matrix; with more classes, the most frequent confusions are listed.
NUM_WORST = 12


def review_classes(reviewed: Reviewed, targets: np.ndarray, logits: np.ndarray, names: Sequence[str]) -> list[Figure]:
    """Figures of targets [examples] and logits [examples, classes]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_parts = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    predicted = logits.argmax(axis=1)
    return [
        _confusions(reviewed, targets, predicted, names),
        *_worst(reviewed, targets, predicted, log_parts, names),
    ]


def _confusions(reviewed: Reviewed, targets: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> Figure:
    right = f"{np.mean(targets == predicted):.1%} of {reviewed.which} are correct"
    if len(names) <= MOST_CLASSES:
        counts = np.zeros((len(names), len(names)), np.int64)
        np.add.at(counts, (targets, predicted), 1)
        return Matrix(
            "Confusion matrix", f"{right}. Rows: true class, columns: predicted.", list(names), counts.tolist()
        )
    wrong = targets != predicted
    pairs = Counter(zip(targets[wrong].tolist(), predicted[wrong].tolist())).most_common(MOST_CLASSES)
    rows = [[names[true], names[taken], count] for (true, taken), count in pairs]
    return Table("Most frequent confusions", f"{right}.", ["true", "predicted", "examples"], rows)


def _worst(
    reviewed: Reviewed, targets: np.ndarray, predicted: np.ndarray, log_parts: np.ndarray, names: Sequence[str]
) -> list[Figure]:
    own = log_parts[np.arange(len(targets)), targets]
    worst = [int(row) for row in np.argsort(own, kind="stable") if targets[row] != predicted[row]][:NUM_WORST]
    if not worst:
        return []
    title, note = "Worst examples", f"Errors with the lowest probability of the true class, among {reviewed.which}."
    sure = np.exp(log_parts[worst, predicted[worst]])
    if reviewed.has_images:
        captions = [
            f"{names[targets[row]]}, predicted {names[predicted[row]]} ({part:.0%})" for row, part in zip(worst, sure)
        ]
        return [
            Pictures(title, note, [(png(as_bytes(reviewed.inputs[row])), text) for row, text in zip(worst, captions)])
        ]
    rows = [
        [row, names[targets[row]], names[predicted[row]], f"{part:.0%}", f"{np.exp(own[row]):.1%}"]
        for row, part in zip(worst, sure)
    ]
    return [Table(title, note, ["example", "true", "predicted", "probability", "of the true class"], rows)]


def review_labels(reviewed: Reviewed, targets: np.ndarray, predicted: np.ndarray) -> list[Figure]:
    """A row for each label of targets and predictions [examples, labels], each 0 or 1."""
    rows = []
    for label, (true, taken) in enumerate(zip(targets.T > 0.5, predicted.T > 0.5)):
        both = int((true & taken).sum())
        precision, recall = both / max(int(taken.sum()), 1), both / max(int(true.sum()), 1)
        rows.append([label, int(true.sum()), f"{np.mean(true == taken):.1%}", f"{precision:.1%}", f"{recall:.1%}"])
    note = f"On {reviewed.which}."
    return [Table("Labels", note, ["label", "examples", "accuracy", "precision", "recall"], rows)]
