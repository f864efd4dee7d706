"""The workloads: model, data, batch and number of steps, the same for all contenders. Pure."""

from dataclasses import dataclass

SMALL, COLOUR = "[28,28,1]", "[32,32,3]"
WIDE = ("model=mlp", "model.hidden=[4096,4096,1024]")


@dataclass(frozen=True)
class Workload:
    """A training, as settings of the runner. batch_size is for one rank; steps are timed after warmup_steps others."""

    name: str
    about: str
    model: tuple[str, ...]
    batch_size: int
    warmup_steps: int
    steps: int
    image_shape: str = SMALL

    def words(self, data: str, num_ranks: int, steps: int | None = None, epochs: int = 1) -> list[str]:
        """The settings for a data set (synthetic or fashion_mnist); without dropout, so that losses agree.

        epochs: of all steps, the warm-up too, with the synthetic data set.
        """
        total = self.warmup_steps + (steps or self.steps)
        if data == "synthetic":
            dataset = ["dataset=synthetic", f"dataset.image_shape={self.image_shape}", "dataset.num_classes=10"]
            dataset.append(f"dataset.num_train={-(-total // epochs) * self.batch_size * num_ranks}")
        else:
            dataset = [f"dataset={data}"]
        return [
            *self.model,
            *dataset,
            f"train.batch_size={self.batch_size}",
            f"train.steps={total}",
            "train.validate_every_epochs=null",
            "optimizer=momentum",
            # The rate does not depend on the number of ranks, and is small, so that losses stay close.
            "train.learning_rate_scale=none",
            "optimizer.learning_rate=0.001",
        ]


_ALL = (
    Workload("tiny", "MLP 784-64-10: overhead", ("model=mlp", "model.hidden=[64]"), 32, 200, 3000),
    Workload("cnn", "MNIST CNN, 1.2 M parameters", ("model=cnn", "model.dropout=[0,0]"), 64, 10, 100),
    Workload("wide", "MLP of 25 M parameters: communication", WIDE, 32, 10, 40),
    Workload("separable", "separable CNN, 2.9 M parameters", ("model=separable_cnn",), 16, 5, 30),
    Workload("resnet20", "ResNet-20, 0.27 M parameters", ("model=resnet20",), 32, 5, 40, COLOUR),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
