"""LocalSGD and DiLoCo: ranks step on their own and synchronize their weights every few steps.

They suit networks on which a reduction takes longer than the step itself. Weights are equal on all ranks right
after a synchronization, and differ until the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer, Optimizer

from hvtrain.keras.gradients import FiniteCheck, expect_rows
from hvtrain.keras.hooks import Distributed, Hook, make_distributed
from hvtrain.keras.in_graph import tf_variable
from hvtrain.keras.optimizer import check_is_plain
from hvtrain.keras.reduction import Reducer

# Settings of DiLoCo's outer optimizer in the paper's experiments (Douillard et al. 2023, section 3).
OUTER_RATE = 0.7
OUTER_MOMENTUM = 0.9


def LocalSGD(  # noqa: N802  (a name like those of Horovod's wrappers)
    optimizer: Optimizer,
    every: int = 16,
    warmup_steps: int = 0,
    within: Any = None,
    **options: Any,
) -> Optimizer:
    """Makes this optimizer step on its rank's own gradients, and average the weights every few steps.

    Local SGD (Stich 2019, arXiv:1805.09767), with any optimizer; each rank keeps its own slots.
    Returns the same object, as DistributedOptimizer does. Weights are equal on all ranks after every
    `every`th step and after synchronize(optimizer), which must be called before an evaluation or a
    checkpoint. Keras's ModelCheckpoint does not call it: with save_freq=N it saves rank 0's own weights,
    unless N is a multiple of `every`.

    With check_finite a synchronization fails if a rank's weights are not finite. Each rank then still has
    the weights of its own last step: set good weights and broadcast them before the next step.

    Args:
        optimizer: a Keras optimizer without gradient_accumulation_steps, use_ema or a loss scale.
        every: number of steps from one synchronization to the next.
        warmup_steps: number of initial steps that reduce gradients instead, as in post-local SGD
            (Lin et al. 2020, arXiv:1808.07217).
        within: a process set of ranks that average their gradients in every step, such as the ranks of
            one host; each rank passes the set that it belongs to.
        options: process_set, bucket_bytes and check_finite of DistributedOptimizer.

    Raises:
        TypeError, ValueError: as for DistributedOptimizer, and for an optimizer that cannot step locally.

    Example:
        optimizer = hvd.LocalSGD(keras.optimizers.SGD(0.1), every=16)
    """
    return _make_local(optimizer, every, warmup_steps, lambda: None, within, **options)


def DiLoCo(  # noqa: N802
    optimizer: Optimizer,
    every: int = 500,
    outer_rate: float = OUTER_RATE,
    outer_momentum: float = OUTER_MOMENTUM,
    warmup_steps: int = 0,
    compression: Any = hvd.Compression.none,
    within: Any = None,
    **options: Any,
) -> Optimizer:
    """Makes this optimizer step on its rank's own gradients, and an outer optimizer on the mean change.

    DiLoCo (Douillard et al. 2023, arXiv:2311.08105): the ranks' mean change of the weights since the last
    synchronization is the gradient of an outer SGD with Nesterov momentum. With outer_rate=1 and
    outer_momentum=0 it is LocalSGD.

    Args:
        outer_rate: learning rate of the outer optimizer.
        outer_momentum: momentum of the outer optimizer.
        compression: the format in which changes are sent; it may be one with error feedback.

    The other arguments, the result and the errors are those of LocalSGD.
    """
    outer = partial(
        keras.optimizers.SGD,
        # Keras rejects an integer learning rate.
        float(outer_rate),
        momentum=float(outer_momentum),
        nesterov=outer_momentum > 0,
    )
    return _make_local(
        optimizer, every, warmup_steps, outer, within, compression=compression, **options
    )


def synchronize(optimizer: Any) -> bool:
    """Synchronizes the ranks' weights now, unless the last step has done so (every rank).

    Returns True if the weights differed before.
    """
    local = local_hook(optimizer)
    step = int(optimizer.iterations)
    if local.reducer.is_alone or not local.have_diverged(step):
        return False
    local.synchronize(optimizer)
    # The next step sets the anchors, because other weights may be loaded before it.
    local.on_weights_set()
    local.synchronized_step = step
    return True


def local_hook(optimizer: Any) -> "LocalHook":
    """Returns the hook of an optimizer made by LocalSGD or DiLoCo. Raises TypeError for others."""
    hook = getattr(optimizer, "_hvtrain", None)
    if not isinstance(hook, LocalHook):
        raise TypeError(
            f"{type(optimizer).__name__} does not step locally; pass what LocalSGD or DiLoCo returned"
        )
    return hook


@dataclass(eq=False)
class LocalHook(Hook):
    """State of an optimizer that steps locally.

    Its reducer reduces gradients during the warm-up, then weights (LocalSGD) or their changes (DiLoCo).
    """

    averages_weights: bool = True
    warmup_steps: int = 0
    outer: Any = None
    # Reduces gradients within the process set `within` after the warm-up, or None.
    within: Reducer | None = None
    # The weights after the last synchronization, for the outer optimizer.
    anchors: list[keras.Variable] = field(default_factory=list)
    has_anchors: Any = None
    # The step after which synchronize() last acted.
    synchronized_step: int = 0

    def have_diverged(self, step: int) -> bool:
        if self.outer and not self.has_anchors:
            return False  # No step since the weights were set on all ranks.
        return (
            step > self.warmup_steps and step % self.every != 0 and step != self.synchronized_step
        )

    def num_due(self, first: int, last: int) -> tuple[int, int]:
        """Returns how many reductions are due in steps first + 1 to last, as (over all ranks, inside `within`).

        >>> LocalHook(None, None, every=4, warmup_steps=2).num_due(0, 12)
        (5, 0)
        """
        warm = max(0, min(last, self.warmup_steps) - first)
        begin = max(first, self.warmup_steps)
        rounds = max(0, last // self.every - begin // self.every)
        reduces_within = self.within is not None and not self.within.is_alone
        return warm + rounds, max(0, last - begin) if reduces_within else 0

    def num_done(self) -> tuple[int, int]:
        """Returns how many reductions have run on this rank, as a pair like that of num_due()."""
        within = 0 if self.within is None else int(self.within.count)
        return int(self.reducer.count), within

    def build(self, variables: Sequence[Any]) -> None:
        if self.outer and not self.anchors:
            self.anchors = [keras.Variable(variable, name="anchor") for variable in variables]
            self.outer.build(self.anchors)
            for variable, anchor in zip(variables, self.anchors):
                # Through this attribute, a broadcast after the first step sets the anchor too.
                tf_variable(variable).anchor = anchor
                anchor.constraint = variable.constraint
            with tf.init_scope():
                self.has_anchors = tf.Variable(False, trainable=False, name="has_anchors")

    def on_weights_set(self) -> None:
        # A rank that joins an elastic job does not know when the others synchronized.
        self.synchronized_step = 0
        # A model without an Input is broadcast only after its first step, which has already set anchors.
        if self.has_anchors is not None:
            self.has_anchors.assign(False)

    def begin_round(self, step: Any, variables: Sequence[Any]) -> None:
        """Copies the weights to the anchors at the beginning of the training and of each round."""
        if not self.outer:
            return

        def set_anchors():
            for anchor, variable in zip(self.anchors, variables):
                anchor.assign(tf_variable(variable))
            self.has_anchors.assign(True)
            if self.warmup_steps and self.reducer.compressed:
                for name, error in self.reducer.compressed.memory.items():
                    # Dropped after the warm-up: errors of gradients have a different unit from errors of changes.
                    if name.startswith("sum/"):
                        error.assign(error * tf.cast(step != self.warmup_steps, error.dtype))

        # Also at the end of the warm-up: all ranks share its changes, so they must not count as changes of a round.
        begins = (step % self.every == 0) | (step == self.warmup_steps)
        tf.cond(begins | ~self.has_anchors, set_anchors, lambda: None)

    def synchronize(self, optimizer: Any) -> None:
        """Averages the weights, or steps the outer optimizer on the mean change (every rank)."""
        variables = optimizer._trainable_variables
        own = [tf.convert_to_tensor(tf_variable(variable)) for variable in variables]
        if not self.outer:
            means = self._check(own, self.reducer(own, variables))
            for variable, mean in zip(variables, means):
                variable.assign(variable.constraint(mean) if variable.constraint else mean)
            return
        changes = [tf_variable(anchor) - value for anchor, value in zip(self.anchors, own)]
        self.outer.apply(self._check(changes, self.reducer(changes, variables)), self.anchors)
        for variable, anchor in zip(variables, self.anchors):
            variable.assign(tf_variable(anchor))

    def _check(self, own: list[tf.Tensor], means: list[tf.Tensor]) -> list[tf.Tensor]:
        if not self.finite_check:
            return means
        # Without waiting, the zeros that replace non-finite values would become the weights.
        return self.finite_check(own, means, waits=True)


class LocalSteps(Distributed):
    """Reduces gradients only during the warm-up, and weights afterwards."""

    _hvtrain: LocalHook
    built: bool
    iterations: Any
    _trainable_variables: list[Any]

    def build(self, variables: Any) -> None:
        super().build(variables)
        self._hvtrain.build(variables)

    @property
    def rank_variables(self) -> dict[str, Any]:
        """The slots, which differ between ranks, and the outer optimizer's variables, which do not, by name."""
        shared = (self.iterations, getattr(self, "_learning_rate", None))
        slots = [
            variable
            for variable in self.variables
            if not any(variable is other for other in shared)
        ]
        outer = self._hvtrain.outer.variables if self._hvtrain.outer else []
        # Renamed, because these errors have a different unit from the errors of gradients that strategy=horovod saves.
        memory = {
            name.replace("/error/", "/error_of_change/"): variable
            for name, variable in super().rank_variables.items()
        }
        return (
            memory
            | {f"mean/slot/{i:04d}": variable for i, variable in enumerate(slots)}
            | {
                f"same/outer/{i:04d}": variable
                for i, variable in enumerate(outer)
                # The rate is a setting, which a resume may change.
                if variable.name != "learning_rate"
            }
        )

    def register_local_var(self, var: Any) -> None:
        raise ValueError(
            "LocalSGD and DiLoCo average all weights; use DistributedOptimizer for local variables"
        )

    def _reduce(self, grads, variables):
        local = self._hvtrain
        if local.reducer.is_alone:
            return grads
        within = local.within or (lambda gradients, _: gradients)
        if not local.warmup_steps:
            return within(grads, variables)
        # Dense, so that both branches below return the same types.
        dense = [
            gradient if gradient is None else tf.convert_to_tensor(gradient) for gradient in grads
        ]
        positions = [i for i, gradient in enumerate(dense) if gradient is not None]

        def reduce_over_all():
            reduced = super(LocalSteps, self)._reduce(dense, variables)
            return [reduced[i] for i in positions]

        def reduce_within():
            reduced = within(dense, variables)
            return [tf.identity(reduced[i]) for i in positions]

        is_warming_up = tf.convert_to_tensor(self.iterations) < local.warmup_steps
        values = tf.cond(is_warming_up, reduce_over_all, reduce_within)
        for i, value in zip(positions, values):
            dense[i] = value
        return dense

    def _step(self, grads, variables):
        local = self._hvtrain
        if not self.built:
            self.build(variables)
            self.built = True
        if local.reducer.is_alone:
            return super()._step(grads, variables)
        expect_rows(local.reducer.op)  # hvd.join would add zeros to the ranks' weights.
        local.begin_round(tf.convert_to_tensor(self.iterations), self._trainable_variables)
        result = super()._step(grads, variables)
        step = tf.convert_to_tensor(self.iterations)
        is_due = (step > local.warmup_steps) & (step % local.every == 0)
        tf.cond(is_due, lambda: local.synchronize(self), lambda: None)
        return result


def _make_local(
    optimizer: Optimizer,
    every: int,
    warmup_steps: int,
    make_outer: Callable[[], Optimizer | None],
    within: Any,
    check_finite: bool = False,
    **options: Any,
) -> Optimizer:
    check_is_plain(optimizer)
    if every < 1 or warmup_steps < 0:
        raise ValueError(
            f"every={every} with warmup_steps={warmup_steps} is out of range; every must be at least 1, and "
            "warmup_steps at least 0"
        )
    if (
        isinstance(optimizer, LossScaleOptimizer)
        or keras.config.dtype_policy().name == "mixed_float16"
    ):
        raise ValueError(
            "LocalSGD and DiLoCo cannot scale the loss, since each rank would have its own scale; use the policy "
            "mixed_bfloat16 or float32"
        )
    for name in ("gradient_accumulation_steps", "use_ema"):
        if getattr(optimizer, name):
            raise ValueError(f"an optimizer that steps locally cannot have {name}; leave it out")

    if check_finite and options.get("process_set") is not None:
        raise ValueError(
            "check_finite=True needs weights that all ranks share; leave process_set out"
        )
    reducer = Reducer(**options)
    if reducer.op != hvd.Average:
        raise ValueError("LocalSGD and DiLoCo always average weights; leave op out")
    outer = make_outer()
    if outer is None and reducer.compression is not hvd.Compression.none:
        raise ValueError(
            "LocalSGD sends weights, which compression would round; use DiLoCo with outer_rate=1 and "
            "outer_momentum=0 instead"
        )

    hook = LocalHook(
        reducer,
        FiniteCheck() if check_finite else None,
        every=every,
        warmup_steps=warmup_steps,
        outer=outer,
        within=Reducer(process_set=within) if within else None,
    )
    wrap = partial(
        _make_local,
        every=every,
        warmup_steps=warmup_steps,
        make_outer=make_outer,
        within=within,
        check_finite=check_finite,
        **options,
    )
    make_distributed(optimizer, LocalSteps, hook, wrap)
    if optimizer.built:
        optimizer._prepare_variables(optimizer._trainable_variables)
        hook.build(optimizer._trainable_variables)
    return optimizer
