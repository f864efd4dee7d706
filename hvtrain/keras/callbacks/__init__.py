"""Horovod's Keras callbacks on Keras 3, and three more: two checks, and stopping together."""

from hvtrain.keras.callbacks.best_model import BestModelCheckpoint
from hvtrain.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvtrain.keras.callbacks.metric_average import MetricAverageCallback
from hvtrain.keras.callbacks.reduction_check import ReductionCheckCallback
from hvtrain.keras.callbacks.stop_together import StopTogetherCallback
from hvtrain.keras.callbacks.warmup import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvtrain.keras.callbacks.weight_check import WeightCheckCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ReductionCheckCallback",
    "StopTogetherCallback",
    "WeightCheckCallback",
]
