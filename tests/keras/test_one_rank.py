"""What the library does on one rank, where nothing is reduced."""

import errno
import os
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.errors import StorageError
from hvtrain.keras import collectives, ordered_reduction, sharded_embedding
from hvtrain.keras.compression import sent_bytes
from hvtrain.keras.gradients import FiniteCheck, group_by_message
from hvtrain.keras.in_graph import END_OF_EPOCH
from hvtrain.keras.optimizer import gradient_norm
from hvtrain.keras.ordered_reduction import OrderedReducer, ordered_means
from hvtrain.keras.process import is_lost_rank_error
from hvtrain.keras.reduction import Reducer
from hvtrain.keras.sharded_optimizer import Part
from hvtrain.keras.table_rows import Rows


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    hvd.init()


@pytest.mark.parametrize(("averages", "weight"), [(False, -2.0), (True, -1.0)])
def test_accumulated_gradients_are_summed_as_on_several_ranks(averages, weight):
    variable = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        backward_passes_per_step=2,
        average_aggregated_gradients=averages,
    )
    optimizer.build([variable])
    for _ in range(2):
        optimizer.apply([tf.constant([1.0])])
    assert variable.numpy() == [weight]


def test_an_ordered_mean_keeps_the_digits_of_float64():
    value = tf.constant([1 + 1e-12], tf.float64)
    (mean,) = ordered_means([[value]], "digits", hvd.global_process_set)
    assert mean.numpy() == value.numpy()


def test_an_ordered_reduction_counts_the_bytes_of_float64(monkeypatch):
    two_ranks = SimpleNamespace(size=lambda: 2, included=lambda: True, process_set_id=0)
    monkeypatch.setattr(ordered_reduction, "compare_structure", lambda *_: None)
    monkeypatch.setattr(ordered_reduction, "ordered_means", lambda parts, *_: parts[0])
    reducer = OrderedReducer(process_set=two_ranks)
    reducer([tf.zeros([3]), tf.zeros([2], tf.float64)])
    assert reducer.sent_bytes == 5 * 8, "half of its part, and its half of the mean"


def test_a_loss_that_is_not_scaled_has_no_overflow(monkeypatch):
    monkeypatch.setattr(keras.config, "dtype_policy", lambda: SimpleNamespace(name="mixed_float16"))
    variable = keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), check_finite=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the gradient is not finite"):
        optimizer.apply([tf.constant([np.nan])], [variable])
    assert variable.numpy() == [1.0]


def test_halving_the_loss_scale_in_vain_is_told_while_accumulating():
    variable = keras.Variable([1.0])
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
    optimizer = hvd.DistributedOptimizer(scaled, check_finite=True)
    optimizer.build([variable])
    optimizer.scale_loss(1.0)
    gradients = [tf.constant([np.nan])]
    optimizer.apply(gradients, [variable])
    assert float(optimizer.dynamic_scale) == 0.5
    with pytest.raises(tf.errors.InvalidArgumentError, match="the gradient is not finite"):
        optimizer.apply(gradients, [variable])


def test_the_norm_is_that_of_the_gradients_of_the_last_step_without_any_scale():
    variable = keras.Variable([1.0, 1.0])
    fixed = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, loss_scale_factor=8.0), check_finite=True
    )
    fixed.apply([fixed.scale_loss(tf.constant([3.0, 4.0]))], [variable])
    assert gradient_norm(fixed) == 5.0

    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner), check_finite=True)
    scaled.build([variable])
    for gradient in ([2.0, 0.0], [4.0, 8.0], [100.0, 0.0]):
        scaled.apply([scaled.scale_loss(tf.constant(gradient))], [variable])
    assert gradient_norm(scaled) == 5.0, "of the mean of the first two; the third is no step yet"


def test_weights_averaged_in_every_step_are_not_taken_for_gradients():
    optimizer = hvd.LocalSGD(keras.optimizers.SGD(), every=1, check_finite=True)
    assert gradient_norm(optimizer) is None
    with pytest.raises(ValueError, match="needs ranks that average whole gradients"):
        hvd.NoiseScale(optimizer)


def test_on_gpus_weights_wait_for_their_check_and_gradients_of_the_warmup_do_not(monkeypatch):
    """Zeros that replace values that are not finite must not become weights."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    monkeypatch.setattr(Reducer, "is_alone", False)
    waits = []

    class RecordingCheck(FiniteCheck):
        def __call__(self, own, reduced, **options):
            waits.append(self.waits or options.get("waits", False))
            return reduced

    optimizer = hvd.LocalSGD(keras.optimizers.SGD(), every=1, warmup_steps=1, check_finite=True)
    check = optimizer._hvtrain.finite_check
    check.__class__ = RecordingCheck
    variables = [keras.Variable([1.0])]
    for _ in range(2):
        optimizer.apply([tf.constant([1.0])], variables)
    assert waits == [False, True]


def test_local_steps_with_a_sum_of_weights_are_refused():
    with pytest.raises(ValueError, match="leave op out"):
        hvd.LocalSGD(keras.optimizers.SGD(), op=hvd.Sum)


def test_a_checkpoint_of_diloco_leaves_the_outer_rate_to_the_settings():
    optimizer = hvd.DiLoCo(keras.optimizers.SGD(), outer_momentum=0.9)
    optimizer.build([keras.Variable([1.0, 2.0])])
    outer = [name for name in optimizer.rank_variables if name.startswith("same/outer/")]
    saved = [optimizer.rank_variables[name] for name in outer]
    assert [tuple(variable.shape) for variable in saved] == [(), (2,)], "its steps and momentum"
    assert all(variable.name != "learning_rate" for variable in saved)


def test_diloco_saves_its_errors_under_another_name_than_those_of_gradients():
    optimizer = hvd.DiLoCo(keras.optimizers.SGD(), compression=hvd.Compression.int8)
    optimizer._hvtrain.reducer.compressed.prepare([keras.Variable([1.0])])
    errors = [name for name in optimizer.rank_variables if name.startswith("sum/")]
    assert errors == ["sum/error_of_change/0000"]


def test_diloco_of_a_built_optimizer_has_anchors():
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable([1.0])])
    assert len(hvd.DiLoCo(optimizer)._hvtrain.anchors) == 1


def test_after_a_reset_local_steps_synchronize_again_at_the_same_step():
    """A rank that joins has not synchronized, and would wait for the others."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = hvd.LocalSGD(keras.optimizers.SGD(), every=16)
    state = hvd.elastic.KerasState(model, optimizer)
    optimizer._hvtrain.synchronized_step = 10
    state.restore()
    state.sync()
    assert optimizer._hvtrain.have_diverged(10)


def test_a_reset_keeps_the_gradients_that_all_ranks_have_accumulated(monkeypatch):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=4)
    state = hvd.elastic.KerasState(model, optimizer)
    for _ in range(3):
        optimizer.apply([tf.constant([[1.0]])])

    def gather(value, name=None, process_set=None):
        # Rank 1 has taken as many calls as this rank, and rank 2 has just joined.
        return [value, value, 0] if name == "hvtrain.accumulated" else [value]

    monkeypatch.setattr(hvd.elastic.hvd, "allgather_object", gather)
    monkeypatch.setattr(collectives, "sum_arrays", lambda arrays: [arrays[0] + 5.0])
    state.sync()
    (accumulator,) = optimizer._accumulated_gradients
    assert accumulator.numpy().item() == (3 + 5) / 2


def test_a_metric_with_a_value_for_each_class_is_averaged():
    logs = {"f1_score": tf.constant([0.5, 1.0]), "loss": 2.0}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"f1_score": [0.5, 1.0], "loss": 2.0}


def test_no_backward_pass_for_a_step_is_refused():
    with pytest.raises(ValueError, match="backward_passes_per_step=0 is out of range"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)


def test_a_variable_in_two_groups_is_reduced_once():
    first, second = variables = [tf.Variable([0.0]), tf.Variable([0.0])]
    gradients = [tf.constant([1.0])] * 2
    groups = [[first], [second, first]]
    assert group_by_message([0, 1], gradients, variables, groups, 0) == [[0], [1]]


def test_rows_of_a_table_of_more_elements_than_int32_counts_are_cut():
    table = SimpleNamespace(shape=(1 << 28, 32))
    part = Part(table, SimpleNamespace(shape=(64, 1)), 1 << 32)
    values = tf.repeat(tf.constant([[1.0], [2.0]]), 32, axis=1)
    own = part.cut(tf.IndexedSlices(values, tf.constant([0, (1 << 27) + 1])))
    assert own.indices.numpy().tolist() == list(range(32, 64))
    assert set(own.values.numpy().ravel()) == {2.0}


@pytest.mark.parametrize("compression", [hvd.Compression.bf16, hvd.Compression.powersgd(1)])
def test_a_gradient_of_unknown_shape_counts_as_no_bytes(compression):
    known = tf.TensorSpec([1024])
    expected = sent_bytes([known], compression, 2)
    assert sent_bytes([tf.TensorSpec(None), known], compression, 2) == expected > 0


@pytest.mark.parametrize(("compression", "item_bytes"), [("none", 4), ("fp16", 2), ("bf16", 2)])
def test_gradients_of_bfloat16_are_sent_as_float32_and_counted_so(compression, item_bytes):
    gradient = tf.TensorSpec([1024], tf.bfloat16)
    assert sent_bytes([gradient], getattr(hvd.Compression, compression), 2) == 1024 * item_bytes


def test_powersgd_sends_float64_as_it_is_and_counts_it_so():
    single, double = (tf.TensorSpec([64, 32], dtype) for dtype in (tf.float32, tf.float64))
    compression = hvd.Compression.powersgd(1)
    sent = sent_bytes([single], compression, 2)
    assert sent_bytes([double], compression, 2) == 2 * sent == 2 * 4 * (64 + 32)


def test_an_average_in_the_place_of_the_name_is_refused():
    with pytest.raises(TypeError, match=r"which is name in hvtrain.keras; pass average=False"):
        hvd.allreduce(1.0, False)


def test_an_epoch_that_ends_after_a_reset_is_no_request_to_stop():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    callback = hvd.StopTogetherCallback()
    callback.set_model(model)
    callback.on_train_begin()
    for asks in (False, True):
        model.stop_training = asks or END_OF_EPOCH
        model._hvtrain_epoch_is_done = True
        callback.on_train_batch_end(0)
        assert model.stop_training is END_OF_EPOCH
        callback.on_epoch_end(0)
        assert model.stop_training is asks


def test_an_epoch_whose_end_failed_does_not_end_the_next_one():
    """StopTogetherCallback exchanges a message at the end of an epoch, which fails if a rank is lost."""

    class RankIsLost(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("a rank is lost")

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    state = SimpleNamespace(batch=1)
    callbacks = [hvd.StopTogetherCallback(), hvd.elastic.UpdateBatchStateCallback(state)]
    x = np.zeros((4, 1))
    with pytest.raises(RuntimeError, match="a rank is lost"):
        model.fit(x, x, batch_size=1, verbose=0, callbacks=[RankIsLost(), *callbacks])
    state.batch = 0
    iterations = int(model.optimizer.iterations)
    model.fit(x, x, batch_size=1, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.iterations) - iterations == 4


def test_intervals_count_batches_where_an_execution_has_several():
    class State:
        commits = 0

        def commit(self):
            self.commits += 1

    state = State()
    compared = []
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse", steps_per_execution=4)
    weights = hvd.WeightCheckCallback(every_batches=10)
    weights.set_model(model)
    weights.check = compared.append
    callbacks = [weights, hvd.elastic.CommitStateCallback(state, batches_per_commit=5)]
    x = np.zeros((12, 1))
    model.fit(x, x, batch_size=1, verbose=0, callbacks=callbacks)
    assert compared == ["at batch 0", "at batch 8", "at the end of the training"]
    assert state.commits == 2, "after 8 batches, and after the epoch"


@pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, hvd.LocalSGD])
def test_weights_are_not_compared_with_ranks_outside_of_the_process_set(wrap):
    optimizer = wrap(keras.optimizers.SGD())
    optimizer._hvtrain.reducer.process_set = SimpleNamespace(process_set_id=1)
    callback = hvd.WeightCheckCallback()
    callback.set_model(SimpleNamespace(optimizer=optimizer))
    with pytest.raises(ValueError, match="process set leaves out some, whose weights may differ"):
        callback.on_train_begin()


def test_a_warm_up_of_half_an_epoch_ends_at_the_rate(monkeypatch):
    monkeypatch.setattr(hvd.callbacks.hvd, "size", lambda: 8)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.8), "mse")
    x = np.zeros((8, 1))
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=1.5, steps_per_epoch=4)
    model.fit(x, x, batch_size=2, epochs=3, verbose=0, callbacks=[warmup])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.8)


def test_a_warm_up_ends_at_the_rate_though_several_steps_are_one_call(monkeypatch):
    monkeypatch.setattr(hvd.callbacks.hvd, "size", lambda: 8)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.8), "mse", steps_per_execution=4)
    x = np.zeros((8, 1))
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=1)
    model.fit(x, x, batch_size=2, epochs=2, verbose=0, callbacks=[warmup])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.8)


def test_each_fit_of_a_schedule_has_its_own_number_of_steps():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.8), "mse")
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.8, lambda epoch: 1 + epoch, staircase=False
    )
    for num_batches in (2, 4):
        x = np.zeros((num_batches, 1))
        model.fit(x, x, batch_size=1, verbose=0, callbacks=[schedule])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.8 * 1.75)


def test_the_momentum_of_float8_layers_is_corrected():
    layer = keras.layers.Dense(16, dtype="float8_from_float32")
    model = keras.Sequential([keras.Input((16,)), layer])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    schedule.set_model(model)
    schedule._set_rate(1.0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)


def test_a_path_that_is_set_later_may_be_a_path(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = tmp_path / "best.keras"
    model.fit(np.zeros((2, 1)), np.zeros((2, 1)), verbose=0, callbacks=[best])
    assert best.filepath == str(tmp_path / "best.keras")
    assert (tmp_path / "best.keras").exists()


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (
            tf.errors.FailedPreconditionError(
                None, None, "Mismatched shapes [Op:HorovodAllreduce]"
            ),
            False,
        ),
        (tf.errors.UnknownError(None, None, "Horovod has been shut down"), True),
    ],
)
def test_shapes_that_differ_are_no_lost_rank(error, is_lost):
    assert is_lost_rank_error(error) == is_lost


def test_tables_that_cannot_be_sharded_are_refused(monkeypatch):
    matrix = keras.initializers.Constant(np.arange(5.0)[:, None])
    with pytest.raises(ValueError, match="cannot be initialized with Constant"):
        hvd.ShardedEmbedding(5, 1, matrix).build()
    layer = hvd.ShardedEmbedding(5, 2)
    layer.build()
    with pytest.raises(ValueError, match="LoRA needs the whole table"):
        layer.enable_lora(2)
    monkeypatch.setattr(sharded_embedding.hvd, "is_initialized", lambda: True)
    monkeypatch.setattr(sharded_embedding.hvd, "rank", lambda: 0)
    monkeypatch.setattr(sharded_embedding.hvd, "size", lambda: 2)
    with pytest.raises(ValueError, match="rows of bfloat16, which Horovod cannot exchange"):
        hvd.ShardedEmbedding(5, 2, dtype="bfloat16").build()


def test_a_schedule_goes_on_in_the_middle_of_an_epoch_after_a_reset():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.8), "mse")
    rates = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.8, lambda epoch: 1 + epoch, staircase=False
    )
    update = hvd.elastic.UpdateBatchStateCallback(SimpleNamespace(batch=2))
    x = np.zeros((4, 1))
    model.fit(x, x, batch_size=1, epochs=2, verbose=0, callbacks=[schedule, update, note])
    assert rates == pytest.approx([0.8 * (1 + batch / 4) for batch in range(2, 8)])


def test_a_warm_up_in_an_elastic_job_needs_its_rate(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.8), "mse")
    warmup = hvd.callbacks.LearningRateWarmupCallback(None)
    with pytest.raises(ValueError, match="initial_lr=None in an elastic job: a rank that joins"):
        model.fit(np.zeros((8, 1)), np.zeros((8, 1)), verbose=0, callbacks=[warmup])


@pytest.mark.parametrize("options", [{"backward_passes_per_step": 2}, {"shard": True}])
def test_an_optimizer_that_clips_is_made_again_from_its_config(options):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, clipnorm=1.0), **options)
    copy = type(optimizer).from_config(optimizer.get_config())
    assert hvd.is_distributed(copy) and copy.get_config() == optimizer.get_config()


def test_a_table_has_as_many_rows_as_an_array_says():
    layer = hvd.ShardedEmbedding(np.array([2, 4]).max() + 1, 3)
    layer.build()
    assert layer._embeddings.shape == (5, 3)
    assert type(layer.get_config()["input_dim"]) is int


def test_a_table_without_space_for_its_file_is_told(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    message = r"of shape \(5, 3\) cannot be written in .*: No space left on device; make room"
    with pytest.raises(StorageError, match=message):
        Rows("t", 5, 0, 1).gather(tf.Variable(tf.zeros([5, 3])), tmp_path)


def test_a_joint_mean_of_many_halves_is_right():
    values = tf.fill([70_000], tf.constant(0.5, tf.float16))
    assert float(hvd.joint_mean(values)) == pytest.approx(0.5)


@pytest.mark.parametrize(("policy", "num_layers"), [("float32", 60), ("mixed_float16", 1)])
def test_an_h5_file_with_many_slots_is_read(tmp_path, policy, num_layers):
    keras.config.set_dtype_policy(policy)
    layers = [
        keras.layers.Dense(1, name=f"layer_with_a_long_name_{'x' * 200}_{n}")
        for n in range(num_layers)
    ]
    model = keras.Sequential([keras.Input((1,)), *layers])
    model.compile("adam", keras.losses.MeanSquaredError())
    model.fit(np.zeros((2, 1)), np.zeros((2, 1)), verbose=0)
    model.save(tmp_path / "m.h5")
    loaded = hvd.load_model(tmp_path / "m.h5")
    keras.config.set_dtype_policy("float32")
    inner = getattr(loaded.optimizer, "inner_optimizer", loaded.optimizer)
    assert inner.iterations.numpy() == 1
    values = [variable.numpy() for variable in model.optimizer.variables]
    np.testing.assert_equal([v.numpy() for v in loaded.optimizer.variables], values)


@pytest.mark.parametrize("name", ["m.h5", "m.keras"])
def test_a_model_saved_before_its_first_step_is_loaded(tmp_path, name):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    loss = keras.losses.MeanSquaredError()
    model.compile(keras.optimizers.Adam(0.25), loss, jit_compile=True)
    model.save(tmp_path / name)
    loaded = hvd.load_model(tmp_path / name)
    assert hvd.is_distributed(loaded.optimizer)
    assert loaded.optimizer.learning_rate.numpy() == 0.25
    assert not loaded.jit_compile


def test_the_part_that_is_distributed_already_is_named():
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(name="inner"))
    with pytest.raises(ValueError, match="inner is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner))
