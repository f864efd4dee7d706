"""Runs for strategies of tf.distribute, which are compared with one process and with ranks of Horovod."""

import numpy as np
from safetensors.numpy import load_file

# Each changes weights 20 times. Adam would magnify the rounding of gradients near 0, so it has no Embedding.
JOINT = {
    "classification": ["optimizer=adamw", "optimizer.global_clipnorm=0.5", "train.class_weights=balanced"],
    "regression": ["optimizer=momentum"],  # With weights of examples.
    "language": ["optimizer=momentum"],  # With an Embedding, and masked.
    "custom": ["optimizer=momentum"],  # With inputs and outputs by name, ignored labels and an added loss.
}
CUSTOM = [
    "task.loss={size: {_target_: keras.losses.MeanSquaredError}, "
    "kind: {_target_: keras.losses.SparseCategoricalCrossentropy, from_logits: true, ignore_class: -1}}",
    "task.loss_weights={kind: 0.5}",
]
SAVED = ["checkpoint.every_steps=1", "checkpoint.keep=99", "train.validate_every_epochs=null"]
TEXT = "\n\n".join(f"{i}: " + " ".join(f"{i * j % 17:04b}" for j in range(40)) for i in range(24))
SAME = {
    "text": [
        *["task=language", "dataset=text", "dataset.file=text.txt", "dataset.vocabulary_size=280", "dataset.length=8"],
        *["model=transformer", "model.blocks=1", "model.width=16", "train.batch_size=16", "optimizer=adamw"],
    ],
    "norm": ["model.norm=true", "dataset.num_validation=40"],
    "parts": ["train.rates={hidden*:0.5}", "train.ema=0.9", "dataset.num_validation=40"],
    "half": ["train.precision=mixed_float16"],
    "mixed targets": ["dataset=digits", "model=mlp", "augment=[random_translation,mix_up]", "train.steps=6"],
}
"""Runs of which every strategy gives the same results; what is drawn by chance is each replica's own."""
DIGITS = ["dataset=digits", "model=cnn", "train.epochs=8"]


def words(kind, *more):
    own = [f"task={kind}", "dataset._target_=kinds.data", "model._target_=kinds.model", "train.batch_size=8"]
    own += [f"++dataset.kind={kind}", f"++model.kind={kind}", "optimizer.learning_rate=0.05"]
    return [*own, *(CUSTOM if kind == "custom" else []), *more]


def runs_of(strategy, forgetful, *joint):
    """Runs by name: against one process on the joint batches, whole ones, and one in two starts."""
    runs = {f"joint {kind}": words(kind, *own, *joint, "train.steps=20", *strategy) for kind, own in JOINT.items()}
    runs["joint one number"] = [
        *words("multilabel", "optimizer=momentum", *joint, "train.steps=20", *strategy),
        "++task.loss={_target_: replicas.OneNumber}",
    ]
    runs["joint forgetful"] = [*runs["joint regression"], f"strategy._target_=replicas.{forgetful}"]
    runs |= {name: [*own, *SAVED, "train.steps=6", *strategy] for name, own in SAME.items()}
    for name in ("text", "norm"):
        runs |= {f"{name} in two": [*runs[name], "train.steps=5"], f"{name} in two/again": runs[name]}
    runs["digits"] = [*DIGITS, *strategy]
    runs["accumulates"] = ["train.accumulate=2", *strategy]
    runs["by xla"] = ["train.jit_compile=true", *strategy]
    runs["own step"] = words("regression", "model._target_=replicas.model", *strategy)
    return runs


def arrays(folder, step=6):
    return load_file(folder / f"checkpoints/step-{step:08d}/state.safetensors")


def largest_gap(first, second):
    """Of the weights of two checkpoints, relative to the largest value of each."""
    names = [name for name in first if name.startswith("model/")]
    return max(float(np.max(np.abs(first[n] - second[n])) / max(np.max(np.abs(first[n])), 1e-6)) for n in names)
