"""Every metric of Keras, as settings of a task that takes it, or with the reason why none does."""

from __future__ import annotations

CLASSES = "num_classes: 3"
ONE_CLASS = f"{CLASSES}, target_class_ids: [0]"
# By the task, each metric with its arguments.
TAKEN = {
    "multilabel": {
        **dict.fromkeys(("AUC", "BinaryAccuracy", "BinaryCrossentropy", "BinaryIoU"), ""),
        **dict.fromkeys(("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge"), ""),
        **dict.fromkeys(("F1Score", "FBetaScore"), "average: macro"),
        **dict.fromkeys(("FalseNegatives", "FalsePositives", "TrueNegatives", "TruePositives"), ""),
        **dict.fromkeys(("Hinge", "Precision", "Recall", "SquaredHinge"), ""),
        "TopKCategoricalAccuracy": "k: 2",
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
# Refused, because they take nothing but probabilities or numbers; each with the argument that it needs.
OF_PROBABILITIES = {
    "PrecisionAtRecall": "recall",
    "RecallAtPrecision": "precision",
    "SensitivityAtSpecificity": "specificity",
    "SpecificityAtSensitivity": "sensitivity",
    **dict.fromkeys(("Accuracy", "ConcordanceCorrelation", "CosineSimilarity", "KLDivergence"), ""),
    **dict.fromkeys(("LogCoshError", "PearsonCorrelation", "Poisson", "R2Score"), ""),
    **dict.fromkeys(("MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredError"), ""),
    **dict.fromkeys(("MeanSquaredLogarithmicError", "RootMeanSquaredError"), ""),
}
# What multilabel says of the others.
REFUSED = {
    "F1Score": r"task\.metrics\.own gives several numbers, .*average=macro",
    "Mean": r"task\.metrics\.own cannot take targets .* multiple values for argument 'sample_weight'",
    "MeanMetricWrapper": r"MeanMetricWrapper.* missing 1 required positional argument: 'fn'",
    "Metric": r"task\.metrics\.own cannot take targets .*: NotImplementedError",
    "Sum": r"task\.metrics\.own cannot take targets .* multiple values for argument 'sample_weight'",
    "TopKCategoricalAccuracy": r"task\.metrics\.own takes the 5 largest of 3 outputs, whatever they are",
}


def metric_settings(task: str) -> list[str]:
    """Settings that add all metrics that a task takes, each under its own name."""
    settings = []
    for name, arguments in TAKEN.get(task, {}).items():
        items = [f"_target_: keras.metrics.{name}", *filter(None, [arguments])]
        settings.append(f"+task.metrics.{name}={{{', '.join(items)}}}")
    return settings
