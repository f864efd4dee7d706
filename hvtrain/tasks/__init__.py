"""What is learned: the loss, the metrics, and what the model gives. A user chooses it as `task=`."""

from hvtrain.tasks.classification import Classification
from hvtrain.tasks.task import Task

__all__ = ["Classification", "Task"]
