"""DeepLabv3+: the same kernels at more places than keras.applications has them, any sides, any precision."""

import keras
import numpy as np
import pytest

from hvtrain.errors import ConfigError
from hvtrain.models import deeplabv3plus
from hvtrain.models.deeplab import FEATURE_LAYERS, dilation_changes
from hvtrain.models.memory import recompute
from hvtrain.models.networks import body, clone
from launching import without_hvtrain

nightly, release = pytest.mark.nightly, pytest.mark.release
TINY = {"backbone": "MobileNetV2", "alpha": 0.35, "filters": 16}
MOBILE_NET, RES_NET = ("MobileNetV2", {"alpha": 0.35}), ("ResNet50", {})


def rates(model):
    all_rates = {layer.name: getattr(layer, "dilation_rate", (1, 1))[0] for layer in model.layers}
    return {
        name: rate for name, rate in all_rates.items() if rate > 1 and not name.startswith("aspp")
    }


RESNET = [
    [f"conv{stage}_block{block}_2_conv" for block in range(1, last + 1)]
    for stage, last in ((4, 6), (5, 3))
]
MOBILE = [
    [f"block_{block}_depthwise" for block in blocks] for blocks in (range(7, 14), (14, 15, 16))
]


@pytest.mark.parametrize(
    ("backbone", "options", "output_stride"),
    [
        *((*MOBILE_NET, output_stride) for output_stride in (8, 16, 32)),
        pytest.param(*RES_NET, 8, marks=nightly),  # Which dilates most.
        pytest.param(*RES_NET, 16, marks=release),
        pytest.param(*RES_NET, 32, marks=release),
    ],
)
def test_features_are_as_fine_as_the_output_stride_says_and_later_blocks_dilated(
    backbone, options, output_stride
):
    model = deeplabv3plus((64, 96, 3), 5, backbone, output_stride, filters=8, **options)
    low, high = (model.get_layer(name).output.shape for name in FEATURE_LAYERS[backbone])
    assert low[1:3] == (16, 24) and high[1:3] == (64 // output_stride, 96 // output_stride)
    assert model.output.shape == (None, 64, 96, 5)
    middle, last = RESNET if backbone == "ResNet50" else MOBILE
    expected = {
        8: dict.fromkeys(middle, 2) | dict.fromkeys(last, 4),
        16: dict.fromkeys(last, 2),
        32: {},
    }
    assert rates(model) == expected[output_stride]
    pyramid = [
        model.get_layer(f"aspp_rate{number}_depthwise").dilation_rate[0] for number in (1, 2, 3)
    ]
    assert pyramid == {8: [12, 24, 36], 16: [6, 12, 18], 32: [3, 6, 9]}[output_stride]
    own = {
        variable.path: variable.shape for variable in body((64, 96, 3), backbone, **options).weights
    }
    ours = {variable.path: variable.shape for variable in model.weights}
    shared = {path for path in own if not path.startswith("Conv_1")}
    assert {path: ours[path] for path in shared} == {path: own[path] for path in shared}, (
        "keras.applications' weights"
    )


@pytest.mark.parametrize(
    ("backbone", "options"), [MOBILE_NET, pytest.param(*RES_NET, marks=release)]
)
def test_each_place_sees_what_the_undilated_network_sees_there(backbone, options):
    """On odd sides, where strides leave no pixel over: every second or fourth feature is keras.applications' own."""
    keras.utils.set_random_seed(0)
    plain, images = (
        body((65, 97, 3), backbone, **options),
        np.random.default_rng(0).normal(size=(1, 65, 97, 3)),
    )
    for variable in plain.weights:  # So that each layer gives something, in inference too.
        positive = variable.name in ("moving_variance", "gamma")
        fan_in = np.prod(variable.shape[:2]) * (
            1 if "depthwise" in variable.path else variable.shape[-2:][0]
        )
        drawn = np.random.default_rng(len(variable.path)).normal(size=variable.shape)
        variable.assign(1 + np.abs(drawn) / 10 if positive else drawn * (2 / fan_in) ** 0.5)
    inner = FEATURE_LAYERS[backbone][1]
    expected = np.asarray(keras.Model(plain.input, plain.get_layer(inner).output)(images))
    assert np.abs(expected).std() > 0.01

    def features(changes):
        image = keras.Input((65, 97, 3))
        network = clone(plain, image, changes)
        network.set_weights(plain.get_weights())
        return np.asarray(keras.Model(image, network.get_layer(inner).output)(images))

    for output_stride in (8, 16, 32):
        changes, step = dilation_changes(plain, output_stride), 32 // output_stride
        dilated_features = features(changes)
        assert dilated_features.shape[1:3] == (64 // output_stride + 1, 96 // output_stride + 1)
        np.testing.assert_allclose(
            dilated_features[:, ::step, ::step],
            expected,
            rtol=1e-3,
            atol=1e-4 * np.abs(expected).max(),
        )
        if step == 2:
            undilated = {
                n: {k: v for k, v in to.items() if k != "dilation_rate"}
                for n, to in changes.items()
            }
            other = features(undilated)[:, ::step, ::step]
            assert np.abs(other - expected).max() > 0.1 * np.abs(expected).max(), (
                "strides alone are not enough"
            )


@pytest.mark.parametrize(
    "image_shape",
    [
        (33, 40, 3),
        pytest.param((70, 51, 1), marks=nightly),
        pytest.param((32, 32, 3), marks=nightly),
    ],
)
def test_any_sides_give_a_logit_for_each_class_at_each_pixel(image_shape):
    model = deeplabv3plus(image_shape, 4, **TINY)
    images = np.random.default_rng(0).normal(size=(2, *image_shape)).astype("float32")
    assert np.asarray(model(images)).shape == (2, *image_shape[:2], 4)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_logits_are_float32_under_mixed_precision(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = deeplabv3plus((40, 40, 3), 4, **TINY)
    finally:
        keras.config.set_dtype_policy(before)
    assert (
        model.output.dtype == "float32"
        and np.asarray(model(np.ones((1, 40, 40, 3)))).dtype == "float32"
    )
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    assert model.get_layer("aspp_project").compute_dtype == policy.removeprefix("mixed_")


@nightly
def test_a_second_build_has_the_same_names():
    first, second = (deeplabv3plus((32, 32, 3), 4, **TINY) for _ in range(2))
    assert [layer.name for layer in first.layers] == [layer.name for layer in second.layers]
    paths = [variable.path for variable in first.weights]
    assert paths == [variable.path for variable in second.weights] and len(set(paths)) == len(paths)


@nightly
def test_it_learns_recomputed_too():
    """Discs, after some steps; with activations computed again the losses are the same to rounding."""
    ys, xs = np.mgrid[:32, :32] - 16
    masks = np.stack([np.hypot(ys - shift, xs + shift) < 7 for shift in (-5, 0, 4, 6)]).astype(
        "uint8"
    )
    images, losses = masks[..., None] * np.ones(3) - 0.5, []
    for again in (False, True):
        keras.utils.set_random_seed(1)
        model = deeplabv3plus((32, 32, 3), 2, **TINY, atrous_rates=[1, 2, 3])
        if again:
            recompute(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
        losses.append(model.fit(images, masks, batch_size=4, epochs=8, verbose=0).history["loss"])
    assert losses[0][-1] < 0.5 * losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)


def test_a_call_is_inference():
    """keras.layers.Resizing in the middle would have the layers behind it train."""
    model, images = deeplabv3plus((33, 40, 3), 4, **TINY), np.ones((2, 33, 40, 3), "float32")
    first = np.asarray(model(images))
    np.testing.assert_array_equal(first, model(images, training=False))
    assert np.abs(first - model(images, training=True)).max() > 0.1


@nightly
def test_it_loads_in_plain_keras(tmp_path):
    model = deeplabv3plus((33, 40, 3), 4, **TINY)
    images = np.random.default_rng(0).normal(size=(2, 33, 40, 3)).astype("float32")
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "seen.npz", images=images, logits=np.asarray(model(images)))
    code = (
        "import keras, numpy as np; seen = np.load('seen.npz'); model = keras.models.load_model('model.keras');"
        "print(np.abs(np.asarray(model(seen['images'])) - seen['logits']).max() < 1e-3)"
    )
    assert without_hvtrain(code, cwd=tmp_path).strip() == "True"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "ResNet"}, r"backbone=ResNet; did you mean 'ResNet50'\?"),
        ({"backbone": "VGG16"}, r"backbone=VGG16; known: MobileNetV2, ResNet101, ResNet50"),
        ({"output_stride": 4}, "output_stride=4; it needs 8, 16 or 32"),
        ({"norm_momentum": 1}, "norm_momentum=1; it needs a number between 0 and 1, such as 0.9"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"^deeplabv3plus was given {message}"):
        deeplabv3plus((64, 64, 3), 5, **options)


def test_what_the_backbone_does_not_take_is_refused():
    with pytest.raises(TypeError, match=r"ResNet50.* got an unexpected keyword argument 'alpha'"):
        deeplabv3plus((64, 64, 3), 5, alpha=0.5)
    with pytest.raises(
        ValueError, match=r"must be at least 32x32; Received: input_shape=\(20, 64, 3\)"
    ):
        deeplabv3plus((20, 64, 3), 5, **TINY)
