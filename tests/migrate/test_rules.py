"""What hvtrain migrate makes of single lines, and what it leaves to the user; nothing here trains."""

import textwrap

import pytest

from hvtrain.errors import ConfigError
from hvtrain.migrate.tables import TF_KERAS, exists

pytest.importorskip("libcst", reason="libcst is not installed; ./scripts/run pytest does it")

from hvtrain.migrate.rewriting import migrate
from hvtrain.migrate.tables import _EXACT, ADVICE

HVD = "import hvtrain.keras as hvd\n"
REWRITTEN = {
    "import horovod.keras as hvd": "import hvtrain.keras as hvd",
    "from horovod.tensorflow import keras as hvd": "import hvtrain.keras as hvd",
    "import horovod.tensorflow.keras\nhorovod.tensorflow.keras.init()": "import hvtrain.keras\nhvtrain.keras.init()",
    "from horovod.tensorflow.keras.callbacks import MetricAverageCallback":
        "from hvtrain.keras.callbacks import MetricAverageCallback",
    "import tensorflow as tf\ntf.keras.layers.Dense(1)": "import keras\nkeras.layers.Dense(1)",
    "import tensorflow as tf\ntf.abs(tf.keras.Input((1,)))":
        "import keras\nimport tensorflow as tf\ntf.abs(keras.Input((1,)))",
    "import os, tensorflow as tf\nos, tf.abs(tf.keras.Input((1,)))":
        "import keras\nimport os, tensorflow as tf\nos, tf.abs(keras.Input((1,)))",
    "def f():\n    import tensorflow as tf\n    return tf.abs(tf.keras.Input((1,)))":
        "import keras\ndef f():\n    import tensorflow as tf\n    return tf.abs(keras.Input((1,)))",
    "import tensorflow.keras.layers as L\nL.Dense(1)": "from keras import layers as L\nL.Dense(1)",
    "from tensorflow.keras.layers import *": "from keras.layers import *",
    "from tensorflow.keras.layers import CuDNNGRU\nCuDNNGRU(1)": "from keras.layers import GRU\nGRU(1)",
    "from tensorflow.keras.layers import CuDNNGRU as G\nG(1)": "from keras.layers import GRU as G\nG(1)",
    "from tensorflow import data, keras\nkeras.Input, data":
        "from tensorflow import data\nimport keras\nkeras.Input, data",
    "from tensorflow.keras import backend as K\nK.sum(x)": "import keras\nkeras.ops.sum(x)",
    "from keras import backend as K\nK.argmax(a)": "import tensorflow as tf\ntf.keras.backend.argmax(a)",
    "from keras import backend as K\nK.sqrt(K.relu(a, max_value=6))":
        "import tensorflow as tf\ntf.keras.backend.sqrt(tf.keras.backend.relu(a, max_value=6))",
    "from keras import backend as K\nK.clip(a, min_value=0, max_value=b)":
        "import keras\nkeras.ops.clip(a, x_min=0, x_max=b)",
    "from keras import backend as K\nK.expand_dims(a)": "import keras\nkeras.ops.expand_dims(a, axis=-1)",
    "from keras import backend as K\nK.expand_dims(a, 1)": "import keras\nkeras.ops.expand_dims(a, 1)",
    "from horovod.keras import rank\nrank()\nmodel.compile(o)":
        "from hvtrain.keras import rank\nrank()\nmodel.compile(o, jit_compile=False)",
    "from keras import backend as K\nK.dot(a, b)": "import tensorflow as tf\ntf.keras.backend.dot(a, b)",
    "import keras\nkeras.optimizers.sgd(lr=1)": "import keras\nkeras.optimizers.SGD(learning_rate=1)",
    "import keras\nkeras.optimizers.Adam(0.1, decay=- 0.0)": "import keras\nkeras.optimizers.Adam(0.1)",
    "import keras\nkeras.optimizers.SGD(0.1, decay=d)":
        "import keras\nkeras.optimizers.SGD(keras.optimizers.schedules.InverseTimeDecay(0.1, 1, d))",
    HVD + "model.compile(o)": HVD + "model.compile(o, jit_compile=False)",
    HVD + "model.compile(o, jit_compile=True)": HVD + "model.compile(o, jit_compile=False)",
    HVD + "model.compile(\n    o,\n    'mse',\n)":
        HVD + "model.compile(\n    o,\n    'mse',\n    jit_compile=False,\n)",
    HVD + "import re\nre.compile('a')": HVD + "import re\nre.compile('a')",
    "model.compile(o, experimental_run_tf_function=False)": "model.compile(o)",
    HVD + "hvd.callbacks.LearningRateScheduleCallback(lambda epoch: 0.5)":
        HVD + "hvd.callbacks.LearningRateScheduleCallback(None, lambda epoch: 0.5)",
    HVD + "hvd.callbacks.LearningRateScheduleCallback(start_epoch=15, end_epoch=25, multiplier=1e-1)":
        HVD + "hvd.callbacks.LearningRateScheduleCallback(initial_lr=None, start_epoch=15, end_epoch=25, "
        "multiplier=lambda epoch: 1e-1)",
    HVD + "hvd.callbacks.LearningRateScheduleCallback(0.1, start_epoch=15)":
        HVD + "hvd.callbacks.LearningRateScheduleCallback(None, lambda epoch: 0.1, start_epoch=15)",
    HVD + "hvd.callbacks.LearningRateScheduleCallback(0.1, 30, 60)":
        HVD + "hvd.callbacks.LearningRateScheduleCallback(None, lambda epoch: 0.1, 30, 60)",
    HVD + "hvd.callbacks.LearningRateScheduleCallback(0.1, 1, start_epoch=5)":
        HVD + "hvd.callbacks.LearningRateScheduleCallback(0.1, 1, start_epoch=5)",
    HVD + "hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=1e-1)":
        HVD + "hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=1e-1)",
    HVD + "hvd.callbacks.LearningRateWarmupCallback(5, verbose=1)":
        HVD + "hvd.callbacks.LearningRateWarmupCallback(None, 5, verbose=1)",
    HVD + "hvd.callbacks.LearningRateWarmupCallback(**options)":
        HVD + "hvd.callbacks.LearningRateWarmupCallback(**options)",
    HVD + "hvd.callbacks.LearningRateWarmupCallback(5, True)":
        HVD + "hvd.callbacks.LearningRateWarmupCallback(None, 5, True)",
    HVD + "hvd.callbacks.LearningRateWarmupCallback(1, 5)": HVD + "hvd.callbacks.LearningRateWarmupCallback(1, 5)",
    "import horovod.tensorflow as hvd\nhvd.allreduce(x, False)\nhvd.allreduce(x, name)":
        "import hvtrain.keras as hvd\nhvd.allreduce(x, average=False)\nhvd.allreduce(x, name)",
    "opt.apply_gradients(pairs, name='step', experimental_aggregate_gradients=False)": "opt.apply_gradients(pairs)",
    "model.fit_generator(generator=g, epochs=2, workers=4)": "model.fit(x=g, epochs=2)",
    "model.evaluate_generator(g, 5)": "model.evaluate(g, steps=5)",
    "model.save_weights(f'w-{n}.h5')": "model.save_weights(f'w-{n}.weights.h5')",
    "name = 'w.h5'\nmodel.save_weights(name)\nmodel.load_weights('w.h5')":
        "name = 'w.weights.h5'\nmodel.save_weights(name)\nmodel.load_weights('w.weights.h5')",
    "model.load_weights('old.h5')": "model.load_weights('old.h5')",
    "model.save('model')\nkind = 'model'": "model.save('model.keras')\nkind = 'model'",
    "model.save('folder/')": "model.save('folder.keras')",
    "from keras.models import load_model\nmodel.save('m')\nload_model('m')":
        "from keras.models import load_model\nmodel.save('m.keras')\nload_model('m.keras')",
    "import keras\nkeras.callbacks.ModelCheckpoint('{epoch:02d}.hdf5')":
        "import keras\nkeras.callbacks.ModelCheckpoint('{epoch:02d}.keras')",
    "import keras\nkeras.callbacks.ModelCheckpoint('w.h5', 'loss', 0, True)":
        "import keras\nkeras.callbacks.ModelCheckpoint('w.h5', 'loss', 0, True)",
    "import keras\nkeras.callbacks.ModelCheckpoint('w.h5', 'loss', 0, True, True)":
        "import keras\nkeras.callbacks.ModelCheckpoint('w.weights.h5', 'loss', 0, True, True)",
    "self.compiled_loss(y, p, w)": "self.compute_loss(y=y, y_pred=p, sample_weight=w)",
    "self.compiled_loss(y, p, sample_weight=w, regularization_losses=self.losses)":
        "self.compute_loss(y=y, y_pred=p, sample_weight=w)",
    "image.save('picture')": "image.save('picture')",
    "model.optimizer.lr = 1": "model.optimizer.learning_rate = 1",
    "import horovod.tensorflow as hvd\nhvd.elastic.TensorFlowKerasState(m)":
        "import hvtrain.keras as hvd\nhvd.elastic.TensorFlowKerasState(m)",
    "import horovod.tensorflow as h\nh.keras.callbacks.MetricAverageCallback()":
        "import hvtrain.keras as h\nh.callbacks.MetricAverageCallback()",
    "from horovod.tensorflow.mpi_ops import rank_op\nrank_op()": "from hvtrain.keras import rank_op\nrank_op()",
    "import horovod.tensorflow.mpi_ops as ops\nops.local_rank_op()":
        "import hvtrain.keras as ops\nops.local_rank_op()",
    "import horovod.tensorflow as hvd\nhvd.mpi_ops.size_op()": "import hvtrain.keras as hvd\nhvd.size_op()",
    "from horovod.tensorflow.compression import FP16Compressor": "from hvtrain.keras.compression import FP16Compressor",
    "import horovod\nhorovod.tensorflow.keras.callbacks.MetricAverageCallback()":
        "import hvtrain.keras\nhvtrain.keras.callbacks.MetricAverageCallback()",
    HVD + "class A:\n    def compile(self, a):\n        super().compile(experimental_run_tf_function=False)\n"
    "x = A()\nx.compile(b)":
        HVD + "class A:\n    def compile(self, a):\n        super().compile(jit_compile=False)\nx = A()\nx.compile(b)",
    HVD + "class A:\n    def compile(self, a):\n        pass\nself.x.compile(a=b)":
        HVD + "class A:\n    def compile(self, a):\n        pass\nself.x.compile(a=b)",
    HVD + "class A:\n    def compile(self, a, **more):\n        super().compile(**more)\nx = A()\nx.compile(a=b)":
        HVD + "class A:\n    def compile(self, a, **more):\n        super().compile(**more)\nx = A()\n"
        "x.compile(a=b, jit_compile=False)",
    "import keras\nclass A(keras.optimizers.SGD):\n    def __init__(self, lr):\n        super().__init__(lr=lr)":
        "import keras\nclass A(keras.optimizers.SGD):\n    def __init__(self, lr):\n"
        "        super().__init__(learning_rate=lr)",
    HVD + "class A(Model):\n    def compile(self, a, b):\n        pass\ndef build():\n    return A()\nx = build()\n"
    "x.compile(a, b)":
        HVD + "class A(Model):\n    def compile(self, a, b):\n        pass\ndef build():\n    return A()\nx = build()\n"
        "x.compile(a, b)",
    HVD + "class A(Model):\n    def compile(self, a):\n        pass\ndef build():\n    return keras.Model()\n"
    "import keras\nx = build()\nx.compile(a)":
        HVD + "class A(Model):\n    def compile(self, a):\n        pass\ndef build():\n    return keras.Model()\n"
        "import keras\nx = build()\nx.compile(a, jit_compile=False)",
    HVD + "class A(Model):\n    def compile(self, a):\n        pass\nclass B(A):\n    def compile(self, a, b):\n"
    "        super().compile(a=a)":
        HVD + "class A(Model):\n    def compile(self, a):\n        pass\nclass B(A):\n    def compile(self, a, b):\n"
        "        super().compile(a=a)",
    "import keras\nclass A(keras.optimizers.SGD):\n    pass\nclass B(A):\n    pass\nB(lr=1)":
        "import keras\nclass A(keras.optimizers.SGD):\n    pass\nclass B(A):\n    pass\nB(learning_rate=1)",
    "import keras\nclass A(keras.optimizers.SGD):\n    def __init__(self, lr):\n        pass\nA(lr=1)":
        "import keras\nclass A(keras.optimizers.SGD):\n    def __init__(self, lr):\n        pass\nA(lr=1)",
    "class A(Metric):\n    def reset_states(self):\n        super().reset_states()\nmetric.reset_states()":
        "class A(Metric):\n    def reset_state(self):\n        super().reset_state()\nmetric.reset_state()",
    "loss = opt.get_scaled_loss(loss)\ngradients = opt.get_unscaled_gradients(scaled)":
        "loss = opt.scale_loss(loss)\ngradients = scaled",
    "from keras.mixed_precision import LossScaleOptimizer\nLossScaleOptimizer(o, dynamic=True)":
        "from keras.mixed_precision import LossScaleOptimizer\nLossScaleOptimizer(o)",
    "import tensorflow as tf\ntf.function(experimental_compile=True)":
        "import tensorflow as tf\ntf.function(jit_compile=True)",
    "clf = LogisticRegression()\nclf.predict_proba(x)\nmodel.predict_proba(x)":
        "clf = LogisticRegression()\nclf.predict_proba(x)\nmodel.predict(x)",
    "from sklearn.svm import SVC\nmodel = SVC(probability=True)\nmodel.predict_proba(x)":
        "from sklearn.svm import SVC\nmodel = SVC(probability=True)\nmodel.predict_proba(x)",
    "opt = parser.parse_args()\nopt.lr\noptimizer.lr": "opt = parser.parse_args()\nopt.lr\noptimizer.learning_rate",
    "from tensorflow.keras.optimizers import SGD\nSGD(lr=0.1, decay=d)":
        "import keras\nfrom keras.optimizers import SGD\n"
        "SGD(learning_rate=keras.optimizers.schedules.InverseTimeDecay(0.1, 1, d))",
    "def save(model, path):\n    path = Path(path)\n    model.save_weights(path)":
        "def save(model, path):\n    path = Path(path)\n    model.save_weights(path)",
    "#!/usr/bin/env python\n\"\"\"Doc.\"\"\"\nfrom __future__ import division\ndef f():\n    import tensorflow as tf\n"
    "    return tf.keras.Sequential()":
        "#!/usr/bin/env python\n\"\"\"Doc.\"\"\"\nfrom __future__ import division\nimport keras\ndef f():\n"
        "    return keras.Sequential()",
    HVD + "import tensorflow as tf\ntry:\n    tf.config.set_visible_devices(gpus[hvd.local_rank()])\nfinally:\n    f()":
        HVD + "try:\n    hvd.pin_gpu()\nfinally:\n    f()",
    "import tensorflow as tf\ntf.logging.info(tf.app.flags.FLAGS)":
        "import tensorflow as tf\ntf.compat.v1.logging.info(tf.compat.v1.flags.FLAGS)",
}  # fmt: skip
PINS = [
    """
    gpus = tf.config.list_physical_devices('GPU')
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')
    """,
    """
    os.environ['CUDA_VISIBLE_DEVICES'] = str(hvd.local_rank())
    """,
    """
    config = tf.compat.v1.ConfigProto()
    config.gpu_options.visible_device_list = str(hvd.local_rank())
    tf.compat.v1.keras.backend.set_session(tf.compat.v1.Session(config=config))
    """,
]
LEFT = {
    "a = 1\nmodel.predict_classes(x)": (2, "predict_classes was removed; use np.argmax(model.predict(x), axis=-1)"),
    "from tensorflow.keras.utils import multi_gpu_model": (1, "no keras.utils.multi_gpu_model; one process"),
    "import keras\nkeras.layers.Desne(1)": (2, "Keras 3 has no keras.layers.Desne; did you mean keras.layers.Dense?"),
    "import tensorflow as tf\ntf.estimator.RunConfig()": (2, "TensorFlow has no estimators any more"),
    "import tensorflow as tf\ntf.distribute.MirroredStrategy()": (2, "Horovod's ranks replace it"),
    "import horovod.tensorflow as hvd\nhvd.check_extension('a')": (2, "hvtrain.keras has no check_extension"),
    "import horovod.keras as hvd\nhvd.DistributedOptimizer(o)\nm.fit(x)": (3, "ranks may start with different weights"),
    HVD + "model.compile(**options)": (2, "they must contain jit_compile=False"),
    HVD + "class A:\n    def compile(self, a, b):\n        pass\ndef train(model):\n    model.compile(a, b)":
        (6, "the script does not show this model's class; add jit_compile=False unless its own compile refuses it"),
    HVD + "import keras\nkeras.callbacks.TensorBoard('logs')": (3, "all ranks would write the same file"),
    "for v in model.trainable_weights:\n    if 'batch_normalization' not in v.name:\n        l2(v)":
        (2, "in Keras 3 v.name, such as kernel, lacks the layer's name; use v.path"),
    "x = [v for v in model.trainable_variables if v.name.startswith('conv')]": (1, "use v.path"),
    "import re\nx = [w for w in model.weights if re.search('bn|dense', w.name)]": (2, "use w.path"),
    HVD + "hvd.callbacks.LearningRateWarmupCallback(args.warmup)":
        (2, "before Horovod 0.20, args.warmup was warmup_epochs; write initial_lr=args.warmup, or"),
    "from keras import backend as K\nK.set_value(model.optimizer.lr, 0.1)": (2, "use variable.assign(value)"),
    HVD + "model.save_weights('w.weights.h5')": (2, "put this call under if hvd.rank() == 0"),
    "model.save_weights(f'')": (1, "make sure that it ends in .weights.h5"),
    "model.save_weights(name)": (1, "make sure that it ends in .weights.h5"),
    HVD + "import keras\nkeras.optimizers.SGD(decay=1e-3)\nhvd.callbacks.LearningRateWarmupCallback(0.1)":
        (3, "decay= is ignored by Keras 3"),
    "import keras\nkeras.callbacks.ModelCheckpoint('a.keras', period=2)": (2, "period= was removed"),
    "model.reset_states()": (1, "reset_states was removed from models; call reset_state() of each stateful layer"),
    "g = tf.clip_by_norm(opt.get_unscaled_gradients(g), 1)": (1, "because the optimizer's step unscales"),
    "from keras.mixed_precision import LossScaleOptimizer\nLossScaleOptimizer(o, dynamic=False)":
        (2, "dynamic= was removed; the scale always adapts"),
    "import keras\nimport tensorflow as tf\nrate = tf.Variable(0.1)\nkeras.optimizers.Adam(rate)":
        (4, "Keras 3 does not accept a tf.Variable as a rate"),
    "import keras\noptions = {'lr': 0.1}\nkeras.optimizers.Adam(**options)": (3, "lr in these arguments is"),
    "import keras\noptions['lr'] = 0.1\nkeras.optimizers.Adam(**options)": (3, "lr in these arguments is"),
    "import keras\nkeras.optimizers.SGD.from_config({'lr': 0.1})": (2, "lr in these arguments is"),
    "import keras\nkeras.optimizers.get({'class_name': 'SGD', 'config': {'lr': 0.1}})": (2, "lr in these arguments is"),
    HVD + "import tensorflow as tf\ntf.function(jit_compile=True)": (3, "XLA cannot compile Horovod's operations"),
    "import tensorflow as tf\ntf.train.StopAtStepHook(9)": (2, "TensorFlow 2 has no tensorflow.train.StopAtStepHook"),
    HVD + "import keras\nif hvd.rank() == 0:\n    c = keras.callbacks.EarlyStopping()":
        (4, "EarlyStopping on rank 0 alone makes that rank train differently"),
    HVD + "import keras\nstop = keras.callbacks.ReduceLROnPlateau()\nif hvd.rank() == 0:\n    callbacks.append(stop)":
        (3, "ReduceLROnPlateau on rank 0 alone makes that rank train differently"),
    HVD + "import keras\nc = [keras.callbacks.EarlyStopping()]\nm.fit(x, callbacks=c if hvd.rank() == 0 else [])":
        (3, "EarlyStopping on rank 0 alone makes that rank train differently"),
    HVD + "import keras\na.compile(hvd.DistributedOptimizer(o))\nb.compile(keras.optimizers.SGD())\n"
    "b.fit(x, callbacks=[hvd.BroadcastGlobalVariablesCallback(0)])": (4, "each rank trains alone; compile"),
    HVD + "hvd.BroadcastGlobalVariablesCallback(0)\nm.fit(x)": (3, "each rank trains alone; compile"),
    "model.save_weights('w-{}.weights.h5'.format(n))\nmodel.load_weights('w-3.h5')":
        (2, "now writes such files as NAME.weights.h5"),
    "model.save_weights(os.path.join('logs', 'w2.h5'))\nmodel.load_weights('logs/w2.h5')":
        (2, "now writes such files as NAME.weights.h5"),
}  # fmt: skip


@pytest.mark.parametrize("old", REWRITTEN)
def test_a_line_is_rewritten_once(old):
    new = migrate(old + "\n").text
    assert new == REWRITTEN[old] + "\n"
    assert migrate(new).text == new


@pytest.mark.parametrize("lines", PINS, ids=["visible devices", "environment", "session"])
def test_statements_that_choose_a_gpu_become_one(lines):
    head = "import os\nimport tensorflow as tf\nimport horovod.keras as hvd\nhvd.init()\n# the GPU"
    assert migrate(head + textwrap.dedent(lines)).text.endswith(
        "import hvtrain.keras as hvd\nhvd.init()\n# the GPU\nhvd.pin_gpu()\n"
    )
    used = migrate(head + textwrap.dedent(lines) + "print(gpus, config)\n").text
    assert ("hvd.pin_gpu()" in used) == ("environ" in lines), "what is used elsewhere stays"


def test_a_loop_of_graph_mode_keeps_its_horovod():
    head = "import tensorflow as tf\nimport horovod.tensorflow as hvd\n"
    loop = "hooks = [hvd.BroadcastGlobalVariablesHook(0)]\ntf.compat.v1.train.AdamOptimizer(0.1).minimize(loss)\n"
    pin = "config = tf.compat.v1.ConfigProto()\nconfig.gpu_options.visible_device_list = str(hvd.local_rank())\n"
    script = migrate(head + loop + pin)
    assert script.text == head + loop + pin
    assert [number for number, _ in script.undecided] == [3, 4, 5]
    assert "examples/tf1_monitored_session.py has one" in script.undecided[0][1]


@pytest.mark.parametrize(
    "lines",
    [
        "ckpt = keras.callbacks.ModelCheckpoint('a.keras')\nif hvd.rank() == 0:\n    callbacks.append(ckpt)",
        "logs = [keras.callbacks.CSVLogger('a')]\nis_chief = hvd.rank() == 0\nif is_chief:\n    callbacks += logs",
        "if hvd.rank() == 0:\n    logs = keras.callbacks.CSVLogger('a')\n    callbacks.append(logs)",
    ],
    ids=["appended", "a list", "made there"],
)
def test_a_callback_that_only_rank_0_uses_is_not_reported(lines):
    assert migrate(f"{HVD}import keras\n{lines}\n").undecided == []


def test_a_callback_that_other_ranks_use_too_is_reported():
    lines = (
        "logs = keras.callbacks.CSVLogger('a')\nif hvd.rank() == 0:\n    print(logs)\nuse(logs)\n"
    )
    ((line, message),) = migrate(f"{HVD}import keras\n{lines}").undecided
    assert line == 3 and "all ranks would write the same file" in message


@pytest.mark.parametrize("name", ["hvd", "K", "tf"])
def test_a_name_that_is_imported_twice_is_what_the_import_above_made_it(name):
    """libcst names both imports, in the order of a set; several names make it likely that a wrong one comes first."""
    text = f"from own import tools as {name}\n{name}.sum(x)\nfrom keras import backend as {name}\n{name}.sum(x)\n"
    first = f"from own import tools as {name}\n{name}.sum(x)\n"
    assert migrate(
        text
    ).text == f"{first}from keras import backend as {name}\nkeras.ops.sum(x)\n".replace(
        "from keras", "import keras\nfrom keras"
    )


def test_memory_growth_alone_stays():
    text = (
        HVD
        + "import tensorflow as tf\nfor gpu in gpus:\n    tf.config.experimental.set_memory_growth(gpu, True)\n"
    )
    assert migrate(text).text == text


@pytest.mark.parametrize("old", LEFT)
def test_what_cannot_be_decided_is_named_with_its_line(old):
    line, message = LEFT[old]
    script = migrate(old + "\n")
    assert [
        (number, text)
        for number, text in script.undecided_in_old()
        if message in text and number == line
    ]
    assert [text for _, text in migrate(script.text).undecided] == [
        text for _, text in script.undecided
    ]


@pytest.mark.parametrize(
    "text",
    [
        "x = [v for v in model.trainable_weights if 'kernel' in v.name]",
        "x = [layer for layer in model.layers if 'batch_normalization' in layer.name]",
        HVD + "hvd.callbacks.LearningRateWarmupCallback(args.base_lr)",
        HVD
        + "import keras\nc = [keras.callbacks.EarlyStopping()]\nif hvd.rank() == 0:\n    c += more\nuse(c)",
        HVD + "import keras\na = hvd.DistributedOptimizer(o)\nb = keras.optimizers.SGD()\n"
        "b = hvd.DistributedOptimizer(b)\nm.compile(b, jit_compile=False)\n"
        "m.fit(x, callbacks=[hvd.BroadcastGlobalVariablesCallback(0)])",
        "if hvd.rank() == 0:\n    model.save_weights('new/w.weights.h5')\nmodel.load_weights('old/w.h5')",
        HVD
        + "def halved(epoch):\n    return 0.5\nhvd.callbacks.LearningRateScheduleCallback(None, halved)",
    ],
)
def test_what_means_the_same_stays(text):
    script = migrate(text + "\n")
    assert script.text == text + "\n" and script.undecided == []


def test_a_writer_on_rank_0_is_right():
    text = HVD + "import keras\nif hvd.rank() == 0:\n    keras.callbacks.TensorBoard('logs')\n"
    assert migrate(text).undecided == []


def test_comments_and_layout_stay():
    text = "from keras.layers import (  # what we need\n    Dense,  # out\n)\nx = [1,2]  # odd\n"
    assert migrate(text.replace("keras", "tensorflow.keras", 1)).text == text


def test_the_names_of_the_tables_are_right():
    new = [name for name in _EXACT.values() if name.startswith("keras.")]
    assert len(new) > 50 and [name for name in new if not exists(name)] == []
    gone = [name for name in (*_EXACT, *ADVICE) if name.startswith("keras.")]
    assert [name for name in gone if exists(name)] == []
    assert exists("keras.preprocessing.text.Tokenizer", TF_KERAS)


@pytest.mark.parametrize("text", ["print 'Python 2'\n", "a = (\n", "a\0b"])
def test_what_is_not_python_is_refused(text):
    with pytest.raises(ConfigError, match=r"^old.py.* is not Python: .*; fix it first$"):
        migrate(text, "old.py")
