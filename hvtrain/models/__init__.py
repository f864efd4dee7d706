"""Builders of networks: shapes in, an uncompiled keras.Model out.

conf/model/*.yaml name them as `_target_`. Every builder takes facts, such as `image_shape` (height,
width, channels) and `num_outputs`, which the runner fills in from the data set and the task, and
its own options from YAML. All builders follow these rules:
- Images and numbers come normalized, as floats; tokens and categories are integers.
- The output is float32, also under mixed precision, of shape (batch, num_outputs), or (batch, ...,
  num_outputs) for a class per pixel or token. It has no activation (use losses with
  from_logits=True). Only two_tower returns vectors instead of logits.
- Every layer with variables has a fixed name, so that variable paths are equal on all ranks and in
  every checkpoint.
- An invalid argument raises ValueError or TypeError, usually Keras's own, which a run shows in one
  line with the setting.
"""

from hvtrain.models.deeplab import deeplabv3plus
from hvtrain.models.networks import application, cnn, mlp, resnet20, resnet50_v1_5, separable_cnn
from hvtrain.models.recommenders import dlrm, two_tower
from hvtrain.models.transformers import transformer

__all__ = [
    "application",
    "cnn",
    "deeplabv3plus",
    "dlrm",
    "mlp",
    "resnet20",
    "resnet50_v1_5",
    "separable_cnn",
    "transformer",
    "two_tower",
]
