"""Every metric of Keras, as settings of a task that takes it, or with the reason why none does."""

from __future__ import annotations

CLASSES = "num_classes: 3"
ONE_CLASS = f"{CLASSES}, target_class_ids: [0]"
# By the task, each metric with its arguments.
TAKEN = {
    "multilabel": {
        **dict.fromkeys(
            ("AUC", "Accuracy", "BinaryAccuracy", "BinaryCrossentropy", "BinaryIoU"), ""
        ),
        **dict.fromkeys(("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge"), ""),
        **dict.fromkeys(
            ("ConcordanceCorrelation", "CosineSimilarity", "Hinge", "KLDivergence", "LogCoshError"),
            "",
        ),
        **dict.fromkeys(("F1Score", "FBetaScore"), "average: macro"),
        **dict.fromkeys(("FalseNegatives", "FalsePositives", "TrueNegatives", "TruePositives"), ""),
        **dict.fromkeys(
            ("MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredError"), ""
        ),
        **dict.fromkeys(
            ("MeanSquaredLogarithmicError", "RootMeanSquaredError", "R2Score", "SquaredHinge"), ""
        ),
        **dict.fromkeys(("Precision", "Recall", "TopKCategoricalAccuracy"), ""),
        "IoU": ONE_CLASS,
        "OneHotIoU": ONE_CLASS,
        "OneHotMeanIoU": CLASSES,
    },
    "classification": {
        "MeanIoU": f"{CLASSES}, sparse_y_pred: false",
        "SparseCategoricalAccuracy": "",
        "SparseCategoricalCrossentropy": "",
        "SparseTopKCategoricalAccuracy": "k: 2",
    },
}
# Refused, because they take nothing but probabilities; each with the argument that it needs.
OF_PROBABILITIES = {
    "PrecisionAtRecall": "recall",
    "RecallAtPrecision": "precision",
    "SensitivityAtSpecificity": "specificity",
    "SpecificityAtSensitivity": "sensitivity",
}
# What multilabel says of the others.
REFUSED = {
    "F1Score": r"task\.metrics\.own gives several numbers, .*average=macro",
    "Mean": r"task\.metrics\.own cannot take targets .* multiple values for argument 'sample_weight'",
    "MeanMetricWrapper": r"MeanMetricWrapper.* missing 1 required positional argument: 'fn'",
    "Metric": r"task\.metrics\.own cannot take targets .*: NotImplementedError",
    "PearsonCorrelation": r"task\.metrics\.own cannot be exact over ranks: .* not a finite sum",
    "Poisson": r"task\.metrics\.own cannot be exact over ranks: .* not a finite sum",
    "Sum": r"task\.metrics\.own cannot take targets .* multiple values for argument 'sample_weight'",
}


def metric_settings(task: str) -> list[str]:
    """Settings that add all metrics that a task takes, each under its own name."""
    settings = []
    for name, arguments in TAKEN.get(task, {}).items():
        items = [f"_target_: keras.metrics.{name}", *filter(None, [arguments])]
        settings.append(f"+task.metrics.{name}={{{', '.join(items)}}}")
    return settings
