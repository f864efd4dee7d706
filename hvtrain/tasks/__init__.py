"""Tasks: the loss, the metrics and the outputs of a model. A user chooses one with `task=`."""

from hvtrain.tasks.classification import Binary, Classification, Multilabel
from hvtrain.tasks.custom import Custom
from hvtrain.tasks.language import Language
from hvtrain.tasks.regression import Regression
from hvtrain.tasks.retrieval import InBatchSoftmax, RecallAtK, Retrieval
from hvtrain.tasks.segmentation import Segmentation
from hvtrain.tasks.task import Task

__all__ = [
    "Binary",
    "Classification",
    "Custom",
    "InBatchSoftmax",
    "Language",
    "Multilabel",
    "RecallAtK",
    "Regression",
    "Retrieval",
    "Segmentation",
    "Task",
]
