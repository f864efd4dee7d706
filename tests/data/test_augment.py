"""Keras's layers on training images: pure functions of (seed, step), with masks and mixed targets."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hvtrain.config.compose import compose
from hvtrain.config.make_plan import make_plan
from hvtrain.config.schema import TrainConfig, from_dict
from hvtrain.core.topology import Topology
from hvtrain.data import from_arrays
from hvtrain.data.pipeline.augmentation import IMAGES, LABELS, MASKS, Augmentation, Masks, PureLayer
from hvtrain.data.sources.built_in import digits
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.errors import ConfigError
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.loop import make_steps
from hvtrain.tasks import Binary, Classification, Multilabel, Regression
from hvtrain.training.augment import open_augmentation
from hvtrain.training.prepared_step import prepare_step, weighted_mixture
from hvtrain.training.run import training_batches
from tiny_data import random_images, write_folder

SHAPE = (12, 12, 3)
SPEC = {IMAGES: tf.TensorSpec([None, *SHAPE]), LABELS: tf.TensorSpec([None, 4])}
IMAGE = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.float32)


def seed(number):
    return tf.constant([5, number], tf.int64)


def batch(count=8):
    """Images of random pixels, with a class each."""
    images = np.random.default_rng(1).integers(0, 256, (count, *SHAPE)).astype(np.float32)
    return {IMAGES: tf.constant(images), LABELS: tf.one_hot(np.arange(count) % 4, 4)}


RANDOM = {
    "RandomCrop": {"height": 9, "width": 9},
    "RandomFlip": {},
    "RandomRotation": {"factor": 0.2},
    "RandomTranslation": {"height_factor": 0.3, "width_factor": 0.3},
    "RandomZoom": {"height_factor": 0.3},
    "RandomShear": {"x_factor": 0.3, "y_factor": 0.3},
    "RandomPerspective": {},
    "RandomErasing": {},
    "RandomElasticTransform": {},
    "RandomBrightness": {"factor": 0.3},
    "RandomContrast": {"factor": 0.3},
    "RandomColorJitter": {
        "brightness_factor": 0.2,
        "contrast_factor": 0.2,
        "saturation_factor": 0.4,
        "hue_factor": 0.1,
    },
    "RandomColorDegeneration": {"factor": 0.5},
    "RandomHue": {"factor": 0.3},
    "RandomSaturation": {"factor": 0.9},
    "RandomGrayscale": {},
    "RandomGaussianBlur": {},
    "RandomSharpness": {"factor": 0.5},
    "RandomPosterization": {"factor": [2, 7]},
    "RandomInvert": {},
    "Solarization": {"addition_factor": 0.3, "threshold_factor": 0.3},
    "MixUp": {},
    "CutMix": {},
    "RandAugment": {},
    "GaussianNoise": {"stddev": 0.9},
    "Dropout": {"rate": 0.3},
}
FIXED = {
    "AutoContrast": {},
    "Equalization": {},
    "CenterCrop": {"height": 9, "width": 9},
    "Rescaling": {"scale": 0.5},
}


@pytest.mark.parametrize("name", [*RANDOM, *FIXED])
def test_a_layer_is_a_pure_function_of_the_seed(name):
    """It keeps no count of its calls, and another process, which builds and traces it anew, gets the same bits."""
    options = {**RANDOM, **FIXED}[name]
    pure, again = (PureLayer("augment.x", getattr(layers, name)(**options), SPEC) for _ in range(2))
    first = pure(batch(), seed(1))
    others = [pure(batch(), seed(number))[IMAGES] for number in range(2, 8)]
    for same in (pure(batch(), seed(1)), again(batch(), seed(1))):
        np.testing.assert_array_equal(first[IMAGES], same[IMAGES])
        np.testing.assert_array_equal(first[LABELS], same[LABELS])
    assert any(not np.array_equal(first[IMAGES], other) for other in others) == (name in RANDOM)
    assert (LABELS in pure.unchanged) == (name not in ("MixUp", "CutMix"))
    assert np.isfinite(first[IMAGES]).all()


class Own(layers.Layer):
    """One of the user's, with noise from Keras's global generator, or from one of its own."""

    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator

    def call(self, images):
        return images + keras.random.normal(keras.ops.shape(images), seed=self.generator)


class Careless(layers.Layer):
    """Layers that keep state in some way."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.count = self.add_weight(shape=(), trainable=False) if kind == "variable" else None

    def call(self, images):
        if self.kind == "tensorflow":
            return images + tf.random.uniform([])
        if self.kind == "python":
            return images + random.random()
        if self.kind == "numpy":
            return images + np.random.uniform()
        if self.kind == "function":
            return tf.ensure_shape(
                tf.py_function(lambda x: x + random.random(), [images], tf.float32), images.shape
            )
        if self.kind == "variable":
            return images + self.count.value.assign_add(1.0)
        return layers.Dense(3)(images) if self.kind == "weights" else images[:, :, :, 7]


def test_layers_of_the_user():
    for layer in (Own(), Own(keras.random.SeedGenerator(3))):
        pure = PureLayer("augment.own", layer, SPEC)
        np.testing.assert_array_equal(
            pure(batch(), seed(1))[IMAGES], pure(batch(), seed(1))[IMAGES]
        )
        assert not np.array_equal(pure(batch(), seed(1))[IMAGES], pure(batch(), seed(2))[IMAGES])


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (
            lambda: Careless("tensorflow"),
            r"augment.x \(Careless\) uses TensorFlow's RandomUniform, which keeps state",
        ),
        (
            lambda: Careless("function"),
            "uses TensorFlow's EagerPyFunc, which keeps state, so that a resumed run would",
        ),
        (lambda: Careless("variable"), "uses TensorFlow's AssignAddVariableOp, which keeps state"),
        (
            lambda: Careless("python"),
            "draws random numbers from Python or NumPy, which would be the same in all steps",
        ),
        (
            lambda: Careless("numpy"),
            "draws random numbers from Python or NumPy, which would be the same in all steps",
        ),
        (layers.AugMix, r"augment.x \(AugMix\) draws random numbers from Python or NumPy"),
        (lambda: layers.Dense(3), r"\(Dense\) has weights, which would stay untrained"),
        (
            lambda: Careless("fails"),
            r"fails on images of shape \(12, 12, 3\): .*test_augment.py, line \d+\); change its",
        ),
    ],
)
def test_what_is_not_pure_is_refused_by_name(layer, said):
    with pytest.raises(ConfigError, match=said):
        PureLayer("augment.x", layer(), SPEC)


# The class of each pixel: 0, 1 or 2.
COLORS = np.repeat(np.arange(3), 4)[:, None, None].repeat(12, 1).repeat(12, 2)
COLORS[:, 2:7, 3:] = (COLORS[:, 2:7, 3:] + 1) % 3
NEAREST = {"interpolation": "nearest", "fill_mode": "constant"}
MOVING = {
    "RandomFlip": {},
    "RandomRotation": {"factor": 0.2, **NEAREST, "fill_value": 9.0},
    "RandomTranslation": {"height_factor": 0.3, "width_factor": 0.3, **NEAREST, "fill_value": 9.0},
    "RandomZoom": {"height_factor": 0.4, **NEAREST, "fill_value": 9.0},
    "RandomShear": {"x_factor": 0.3, "y_factor": 0.3, **NEAREST, "fill_value": 9.0},
    "CutMix": {},
}


@pytest.mark.parametrize("name", MOVING)
def test_masks_move_with_their_images(name):
    """Images whose colors are their labels stay so, and what comes in at a border is ignored."""
    images = tf.constant(COLORS[..., None].repeat(3, -1) * 100, tf.uint8)
    augmentation = Augmentation(
        {"augment.x": getattr(layers, name)(**MOVING[name])}, SHAPE, Masks(255)
    )
    came_in = moved = 0
    for number in range(4):
        found, masks = augmentation(images, tf.constant(COLORS, tf.uint8), seed(number))
        assert found.dtype == masks.dtype == tf.uint8
        labels = np.where(found[..., 0] == 9, 255, found[..., 0] // 100)
        np.testing.assert_array_equal(labels, masks)
        came_in, moved = came_in + (labels == 255).sum(), moved + (labels != COLORS).sum()
    assert moved > 100 and (came_in > 0) == ("fill_value" in MOVING[name])


def test_a_crop_moves_masks_too():
    padded = np.pad(COLORS, [(0, 0), (2, 2), (2, 2)], constant_values=2)
    spec = {IMAGES: tf.TensorSpec([None, 16, 16, 3]), MASKS: tf.TensorSpec([None, 16, 16, 1])}
    crop = PureLayer("augment.x", layers.RandomCrop(12, 12), spec)
    parts = {
        IMAGES: tf.constant(padded[..., None].repeat(3, -1), tf.float32),
        MASKS: tf.constant(padded[..., None], tf.float32),
    }
    found = [crop(parts, seed(number)) for number in range(4)]
    assert all(
        np.array_equal(one[IMAGES][..., :1], one[MASKS]) and one[MASKS].shape[1:3] == (12, 12)
        for one in found
    )
    assert not np.array_equal(found[0][MASKS], found[1][MASKS])


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (layers.MixUp, r"augment.x \(MixUp\) fails on images of shape \(12, 12, 3\) with masks"),
        (
            layers.RandomElasticTransform,
            r"augment.x \(RandomElasticTransform\) blends or loses the labels of masks",
        ),
        (
            lambda: layers.ZeroPadding2D(2),
            r"\(ZeroPadding2D\) takes images alone, so masks would not move with them",
        ),
    ],
)
def test_a_layer_that_would_spoil_masks_is_refused(layer, said):
    with pytest.raises(ConfigError, match=said):
        Augmentation({"augment.x": layer()}, SHAPE, Masks(255))


def test_colors_alone_leave_masks():
    augmentation = Augmentation({"augment.x": layers.RandomGrayscale(1.0)}, SHAPE, Masks(255))
    images, masks = augmentation(batch()[IMAGES], tf.constant(COLORS[:8], tf.uint8), seed(0))
    assert np.array_equal(masks, COLORS[:8]) and np.array_equal(images[..., 0], images[..., 1])
    assert not np.array_equal(images, batch()[IMAGES])


def config(*words):
    return from_dict(compose(["model=mlp", *words]))


def opened(source, task, *words):
    open_augmentation(config(*words), source, task)
    return source


def primary(count=24):
    """Images of one color each, which is their class: red, green or blue."""
    labels = np.arange(count) % 3
    images = np.zeros((count, *SHAPE), np.uint8)
    images[np.arange(count), :, :, labels] = 255
    return from_arrays(images, labels, name="colors", standardize="scale")


@pytest.mark.parametrize("choice", ["mix_up", "cut_mix"])
def test_targets_are_mixed_as_the_images_are(choice):
    source = opened(primary(), Classification(), f"augment=[random_flip,{choice}]")
    stream = training_batches(source, plan_for(source, [8]), Topology(), 1, 0)
    mixed = 0
    for images, targets in stream.take(3).as_numpy_iterator():
        assert (images.dtype, targets.dtype, targets.shape) == (np.uint8, np.float32, (8, 3))
        # CutMix counts the area of its part before the sides are rounded to pixels, each by one of twelve at most.
        np.testing.assert_allclose(
            images.mean(axis=(1, 2)) / 255, targets, atol=0.003 if choice == "mix_up" else 0.17
        )
        np.testing.assert_allclose(targets.sum(axis=1), 1, rtol=1e-5)
        mixed += (targets.max(axis=1) < 0.99).sum()
    assert mixed > 4


@pytest.mark.parametrize(
    ("task", "targets", "hard"),
    [
        (Binary(), np.arange(24) % 2, [0.0, 1.0]),
        (Multilabel(), np.arange(48).reshape(24, 2) // 3 % 2, [0.0, 1.0]),
        (Regression(), np.linspace(-4, 4, 24), None),
    ],
)
def test_targets_of_other_tasks_mix_as_numbers(task, targets, hard):
    targets = targets.astype(np.float32)
    images = np.zeros((24, *SHAPE), np.uint8)
    source = opened(from_arrays(images, targets, images=True), task, "augment=mix_up")
    _, mixed = next(iter(training_batches(source, plan_for(source, [24]), Topology(), 1, 0)))
    assert (
        mixed.shape == targets.shape
        and targets.min() <= mixed.numpy().min()
        and mixed.numpy().max() <= targets.max()
    )
    assert not np.isin(mixed, targets).all()
    assert hard is None or np.isin(task.harden(mixed), hard).all()


def plan_for(source, batch_sizes):
    shards = source.shard_sizes("train", len(batch_sizes))
    return make_plan(TrainConfig(), 0.1, shards, source.name, batch_sizes, "trim")


def joint(source, plan, start_step, num_steps=5):
    """The batches of all ranks of a plan, one rank's behind the other's, by step."""
    places = [
        Topology(rank, plan.size, weights=() if plan.is_resized else plan.weights)
        for rank in range(plan.size)
    ]
    streams = [
        training_batches(source, plan, place, 1, start_step).take(num_steps) for place in places
    ]
    steps = zip(*(stream.as_numpy_iterator() for stream in streams))
    return [tuple(np.concatenate(parts) for parts in zip(*batches)) for batches in steps]


def test_a_stream_that_starts_later_or_on_other_ranks_has_the_same_batches():
    source = opened(
        digits(), Classification(), "augment=[random_translation,random_erasing,mix_up]"
    )
    plan = plan_for(source, [16, 16])
    whole = joint(source, plan, 0)
    for other in (
        joint(source, plan, 2),
        joint(source, plan.on(1), 2),
        joint(source, plan.on(3), 2),
    ):
        for ours, theirs in zip(whole[2:], other):
            assert all(map(np.array_equal, ours, theirs))
    assert whole[0][0].dtype == np.float32, "whole steps of 0 ... 16 would be coarse"


def test_ranks_and_steps_draw_different_numbers():
    """On images that are all the same."""
    source = from_arrays(
        np.repeat(IMAGE[None].astype(np.uint8), 32, axis=0), np.zeros(32, int), num_classes=2
    )
    opened(source, Classification(), "augment=random_translation")
    (first, _), (second, _) = joint(source, plan_for(source, [8, 8]), 0, 2)
    assert len({image.tobytes() for image in [*first, *second]}) == 32


def test_layers_get_the_range_and_the_size_of_the_images():
    brighter = "+augment.x={_target_: keras.layers.RandomBrightness, factor: [0.5, 0.5]}"
    source = opened(digits(), Classification(), brighter)
    images, _ = next(iter(training_batches(source, plan_for(source, [64]), Topology(), 1, 0)))
    assert images.numpy().min() == 8 and images.numpy().max() == 16
    source = opened(digits(), Classification(), "augment=random_crop", "augment.pad.padding=1")
    assert (
        source.augmentation(*map(tf.constant, (np.ones((2, 8, 8, 1), np.uint8), [0, 1])), seed(0))[
            0
        ].shape[1]
        == 8
    )
    assert from_arrays(np.zeros((4, 8, 8), np.float32), np.arange(4)).value_range() == (0, 1)
    assert from_arrays(np.full((4, 8, 8), -2.5, np.float32), np.arange(4)).value_range() == (
        -2.5,
        -2.5,
    )
    assert primary().value_range() == (0, 255)


LAYER = "+augment.x={_target_: keras.layers."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [LAYER + "RandomCrop, height: 4}"],
            r"x \(RandomCrop\) gives images of shape \(4, 8, 1\) at the end of augment",
        ),
        (
            [LAYER + "RandomHue, factor: 0.1}"],
            r"x \(RandomHue\) fails on images of shape \(8, 8, 1\): ValueError: Dim",
        ),
        (
            [LAYER + "RandomRotation}"],
            "x._target_=keras.layers.RandomRotation needs factor, which is not set",
        ),
        (
            [LAYER + "RandomFlp}"],
            "augment.x._target_=keras.layers.RandomFlp cannot be used: No module named 'keras.layers.RandomFlp'",
        ),
        (
            ["+augment.x._target_=keras.losses.MeanSquaredError"],
            "returned a MeanSquaredError; it must return a keras.lay",
        ),
        (
            [LAYER + "Pipeline, layers: [{_target_: keras.layers.RandomContrast, factor: 0.2}]}"],
            r"x \(RandomContrast\) is for values from 0 to 255, and digits gives images from 0 to 16; set value_range",
        ),
        (
            [LAYER + "Rescaling, scale: 0.5}"],
            r"x \(Rescaling\) would rescale the training images but not the validation images",
        ),
        (
            [
                LAYER + "Pipeline, layers: [{_target_: keras.layers.Rescaling, scale: 0.5}, "
                "{_target_: keras.layers.RandomContrast, factor: 0.2, value_range: [0, 8]}]}"
            ],
            r"x \(Rescaling\) would rescale the training images",
        ),
        (
            ["augment=mix_up", "data.augment_on=device", "train.jit_compile=true"],
            "data.augment_on=device and train.jit_co",
        ),
        (
            ["augment=random_resized_crop"],
            "augment=random_resized_crop is taken while images are decoded, and digits gives images that are",
        ),
        (
            ["augment=[random_flip,random_resized_crop]"],
            r"augment=\[random_flip,random_resized_crop\]: random_resized_crop runs .* before any layer; list",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        opened(digits(), Classification(), *words)


def test_layers_that_scale_images_back_are_accepted():
    inner = ", ".join(
        [
            "{_target_: keras.layers.Rescaling, scale: 0.5}",
            "{_target_: keras.layers.RandomContrast, factor: 0.2, value_range: [0, 8]}",
            "{_target_: keras.layers.Rescaling, scale: 2}",
        ]
    )
    source = opened(digits(), Classification(), LAYER + f"Pipeline, layers: [{inner}]}}")
    assert source.augmentation


def test_a_random_crop_is_taken_by_the_source(tmp_path):
    """So it costs no pass over the images, and other layers act on what it leaves."""
    write_folder(tmp_path / "train", *random_images(6))
    crop = ["augment=random_resized_crop", "augment.random_resized_crop.area=[0.5,1]"]
    alone = opened(ImageFolder(str(tmp_path), SHAPE), Classification(), *crop)
    assert (
        tuple(alone.sizing.crop.area) == (0.5, 1)
        and alone.augmentation is None
        and not alone.raw_batches
    )
    both = opened(
        ImageFolder(str(tmp_path), SHAPE),
        Classification(),
        "augment=[random_resized_crop,random_flip]",
    )
    assert both.sizing.crop and both.augmentation and both.raw_batches
    with pytest.raises(
        ConfigError,
        match=r"and image_folder keeps decoded images \(dataset.cache=true\); use other",
    ):
        opened(ImageFolder(str(tmp_path), SHAPE, cache=True), Classification(), *crop)


def test_a_pipeline_is_its_layers():
    layers = ["RandomFlip", "RandomGrayscale", "MixUp"]
    inner = ", ".join(f"{{_target_: keras.layers.{layer}}}" for layer in layers)
    source = opened(
        primary(),
        Classification(),
        f"+augment.x={{_target_: keras.layers.Pipeline, layers: [{inner}]}}",
    )
    assert source.augmentation.mixes


def test_data_and_targets_that_do_not_fit_are_refused():
    images, count = np.zeros((6, *SHAPE), np.uint8), np.arange(6)
    weighted = from_arrays(images, count, w_train=np.ones(6), num_classes=6)
    with pytest.raises(
        ConfigError,
        match=r"augment.mix_up \(MixUp\) mixes the targets of examples, and this run's targets",
    ):
        opened(weighted, Classification(), "augment=mix_up")
    with pytest.raises(
        ConfigError, match="augment=mix_up works on images, and rows has none; leave augment out"
    ):
        opened(
            from_arrays(np.zeros((6, 4)), count, name="rows"), Classification(), "augment=mix_up"
        )
    floats = from_arrays(images.astype(np.float32), count, images=False, name="floats")
    with pytest.raises(
        ConfigError,
        match=r"\(RandAugment\) is for values from 0 to 255, and floats does not give the range of its images",
    ):
        opened(floats, Classification(), "augment=rand_augment")
    assert opened(
        floats,
        Classification(),
        "augment=rand_augment",
        "+augment.rand_augment.value_range=[0,255]",
    )
    with pytest.raises(
        ConfigError, match="not those of the targets or weights of arrays; use only layers that"
    ):
        opened(from_arrays(images, images / 255.0), Regression(), "augment=random_flip")
    opened(from_arrays(images, images / 255.0), Regression(), "augment=random_color_jitter")
    with pytest.raises(
        ConfigError, match=r"task.loss is MeanSquaredError, which may accept only class indices"
    ):
        Classification(loss=keras.losses.MeanSquaredError()).soft_loss()


def trained(on, jit_compile=False):
    source = digits()
    words = [f"data.augment_on={on}", "augment=[random_rotation,random_zoom,mix_up]", "seed=3"]
    opened(source, Classification(), *words)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(source.image_shape), layers.Flatten(), layers.Dense(10)])
    Classification().compile(model, keras.optimizers.SGD(0.1), soft_targets=True)
    model.optimizer.build(model.trainable_variables)
    prepare_step(model, source, harden=Classification().harden)
    batches = training_batches(source, plan_for(source, [32]), Topology(), 3, 0)
    logs = make_steps(model, iter(batches), StepMarks())(40)
    return batches.element_spec[0], model.get_weights(), float(logs["accuracy"])


def test_the_device_does_the_same_as_the_input_pipeline():
    (images, key), in_step, accuracy = trained("device")
    plain, in_pipeline, _ = trained("cpu")
    assert (images.dtype, key.shape, plain.dtype) == (tf.uint8, (2,), tf.float32)
    for ours, theirs in zip(in_step, in_pipeline, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(in_step[0]).max() > 0.2 and accuracy > 0.15, (
        "it has trained, and counts by the larger part"
    )


def test_the_loss_of_a_mixture_is_the_mixture_of_losses():
    """Of the weighted losses of the classes, if these have weights; and so is its gradient."""
    logits = tf.Variable(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32))
    parts = np.random.default_rng(1).dirichlet([1, 1, 1], 5).astype(np.float32)
    by_class, loss = [1.0, 0.0, 4.0], Classification().soft_loss()
    targets, weights = weighted_mixture(tf.constant(parts), by_class)
    with tf.GradientTape(persistent=True) as tape:
        ours = loss(targets, logits, sample_weight=weights)
        of_classes = [
            loss(np.full(5, k), logits, sample_weight=parts[:, k] * by_class[k]) for k in range(3)
        ]
        theirs = tf.add_n(of_classes)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(
        tape.gradient(ours, logits), tape.gradient(theirs, logits), atol=1e-6
    )
    plain = keras.losses.CategoricalCrossentropy(from_logits=True)(parts, logits)
    np.testing.assert_allclose(loss(parts, logits), plain, rtol=1e-6)
    assert keras.losses.deserialize(keras.losses.serialize(loss)).from_logits, (
        "saved as Keras's own"
    )
