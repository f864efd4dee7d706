"""Arithmetic of a run, in numbers."""

import itertools

import pytest

from hvtrain.config.make_plan import (
    batch_sizes_by_rank,
    choose_uneven,
    make_plan,
    planned_batch_sizes,
    resumed_plan,
)
from hvtrain.config.schema import TrainConfig
from hvtrain.core.step_plan import Share
from hvtrain.errors import CheckpointError, ConfigError


def plan(shards, batch_sizes=None, uneven="trim", **train):
    return make_plan(TrainConfig(**train), 0.1, shards, "toys", batch_sizes, uneven)


def test_goyal_et_al():
    """ImageNet over 256 GPUs: batch 8,192, rate 0.1 x 256; the paper counts 0.1 for 256 images on 8 GPUs."""
    made = plan([1_281_167 // 256] * 256, batch_size=32, epochs=90)
    assert made.global_batch == 8192
    assert made.peak_learning_rate == pytest.approx(25.6)
    assert made.num_steps == 90 * (5004 // 32)


def test_steps_follow_the_smallest_shard():
    assert plan([65, 64, 63], batch_size=32).steps_per_epoch == 1


@pytest.mark.parametrize(("scale", "peak"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_learning_rate_scales(scale, peak):
    assert plan([100] * 4, learning_rate_scale=scale).peak_learning_rate == pytest.approx(peak)


def test_steps_count_instead_of_epochs():
    assert plan([100] * 4, steps=17).num_steps == 17
    assert plan([100] * 4, steps=17, epochs=3).num_epochs == 6
    assert plan([100] * 4, steps=20_000, divide_steps_by_size=True).num_steps == 5_000
    assert plan([100] * 4, steps=2, divide_steps_by_size=True).num_steps == 1


def test_more_ranks_than_examples():
    with pytest.raises(
        ConfigError, match=r"4 ranks are more than the 3 training examples of toys .* use at most 3"
    ):
        plan([1, 1, 1, 0], batch_size=1)


def test_batch_larger_than_the_shard():
    with pytest.raises(
        ConfigError,
        match=r"batch_size=32 exceeds the 10 examples of a rank \(21 of toys over 2 ranks\)",
    ):
        plan([11, 10])
    with pytest.raises(ConfigError, match=r"\(10 of toys over 1 rank\)"):
        plan([10])


@pytest.mark.parametrize("examples", range(23, 93))
def test_a_padded_share_deals_each_example_once_and_leaves_no_step_empty(examples):
    steps = max(3, -(-examples // 4))
    if steps > examples:
        pytest.skip("fewer examples than steps are refused")
    share = Share(4, steps, examples)
    begins = [share.begin(step) for step in range(steps + 1)]
    sizes = [after - before for before, after in itertools.pairwise(begins)]
    assert (begins[0], begins[-1]) == (0, examples)
    assert all(1 <= size <= 4 for size in sizes)
    assert sorted(sizes, reverse=True) == sizes, "full batches first"


def test_trimmed_epochs_leave_out_what_fills_no_batch():
    made = plan([719, 718], batch_size=32)
    assert (made.steps_per_epoch, made.examples_per_epoch, made.num_examples) == (22, 1408, 1437)
    assert made.is_even


def test_padded_epochs_use_every_example():
    made = plan([719, 718], batch_size=32, uneven="pad")
    assert (made.steps_per_epoch, made.examples_per_epoch, made.num_examples) == (23, 1437, 1437)
    assert not made.is_even
    assert [made.weight(rank, 3) for rank in (0, 1)] == [1.0, 1.0]
    assert [made.weight(rank, 22) for rank in (0, 1)] == [2 * 15 / 29, 2 * 14 / 29]


@pytest.mark.parametrize(
    ("shards", "accumulate", "choice"),
    [
        ([719, 718], 1, "pad"),  # 29 of 1,437 fill no batch: 2%.
        ([719, 718], 2, "trim"),  # A padded epoch may have no whole number of accumulations.
        ([3210, 3210], 1, "trim"),  # 20 of 6,420: 0.3%.
        ([1000, 30], 1, "trim"),  # 32 steps, and one rank has only 30 examples.
    ],
)
def test_auto_pads_where_trim_would_leave_out_more_than_1_percent(shards, accumulate, choice):
    train = TrainConfig(accumulate=accumulate)
    assert choose_uneven(train, shards, [32, 32]) == choice
    assert choose_uneven(train, shards, [32, 32], can_pad=False) == "trim"
    for can_pad in (True, False):
        # Under another strategy too, which then refuses the run or takes it.
        saved = {"uneven": "pad"}
        assert choose_uneven(TrainConfig(), shards, [32, 32], can_pad, saved) == "pad"


def test_uneven_shards_can_be_refused():
    assert plan([64, 64], uneven="error").is_even
    with pytest.raises(
        ConfigError, match=r"uneven=error and 29 of 1437 training examples of toys fill no batch"
    ):
        plan([719, 718], uneven="error")
    with pytest.raises(
        ConfigError,
        match=r"a rank holds 2 of 1002 .* needs 32 steps for an epoch; spread the files",
    ):
        plan([1000, 2], batch_sizes=[32, 1], uneven="pad")


def test_unlike_ranks_weigh_by_their_examples():
    made = plan([900, 300], batch_sizes=[48, 16], batch_size=[48, 16])
    assert (made.global_batch, made.steps_per_epoch) == (64, 18)
    assert [made.weight(rank, 0) for rank in (0, 1)] == [1.5, 0.5]
    assert not made.is_even


def test_batch_sizes_by_rank_and_by_host():
    hosts = ["a", "a", "b"]
    assert batch_sizes_by_rank(8, hosts) == [8, 8, 8]
    assert batch_sizes_by_rank([8, 4], hosts) == [8, 8, 4]
    assert batch_sizes_by_rank([8, 4, 2], hosts) == [8, 4, 2]
    with pytest.raises(
        ConfigError,
        match=r"\[8, 4, 2, 1\] has 4 numbers for 3 ranks on 2 hosts; give one",
    ):
        batch_sizes_by_rank([8, 4, 2, 1], hosts)


def test_a_data_set_without_training_examples_is_refused():
    with pytest.raises(ConfigError, match="toys has no training examples; check the settings of"):
        plan([0])


@pytest.mark.parametrize(
    ("batch_sizes", "uneven"), [([32, 32], "trim"), ([32, 32], "pad"), ([48, 16], "pad")]
)
@pytest.mark.parametrize("num_ranks", [1, 3, 4, 7, 16])
def test_other_ranks_cut_each_joint_batch_evenly_and_weigh_by_their_part(
    batch_sizes, uneven, num_ranks
):
    shards = [1437 * size // 64 for size in batch_sizes]
    made = plan(shards, batch_sizes, uneven, batch_size=batch_sizes)
    cut = made.on(num_ranks)
    assert (cut.num_steps, cut.global_batch, cut.peak_learning_rate) == (
        made.num_steps,
        64,
        made.peak_learning_rate,
    )
    assert cut.batch_sizes == [end - begin for begin, end in made.on(num_ranks).parts(0)]
    for step in range(made.steps_per_epoch):
        total = made.parts(step)[-1][1]
        parts = cut.parts(step)
        assert (parts[0][0], parts[-1][1], len(parts)) == (0, total, num_ranks)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
        sizes = [end - begin for begin, end in parts]
        assert max(sizes) - min(sizes) <= 1 <= min(sizes)
        weights = [cut.weight(rank, step) for rank in range(num_ranks)]
        assert weights == pytest.approx([num_ranks * size / total for size in sizes])
        begins = made.share_offsets(step)
        for rank, (begin, end) in enumerate(parts):
            shares = cut.shares_of(rank)
            assert begins[shares[0]] <= begin < end <= begins[shares[-1] + 1]
    assert cut.is_even == (num_ranks == 1 or (uneven == "trim" and 64 % num_ranks == 0))


def test_more_ranks_than_examples_of_a_step():
    made = plan([9, 9], batch_size=4, uneven="pad")
    assert made.on(2) == made
    with pytest.raises(
        ConfigError, match=r"3 ranks are more than the 2 example\(s\) of step 3 .* at most 2 rank"
    ):
        made.on(3)


def saved(made, step, batch_size=32, shift=0):
    """What a checkpoint of that step says."""
    epoch, step_in_epoch = divmod(step - shift, made.steps_per_epoch)
    sizes = [share.batch_size for share in made.shares]
    meta = {"num_ranks": len(sizes), "batch_size": batch_size, "batch_sizes": sizes}
    return {**meta, "step": step, "epoch": epoch, "step_in_epoch": step_in_epoch}


def resumed(examples, meta, num_ranks, **train):
    settings = TrainConfig(**train)
    sizes = planned_batch_sizes(meta, settings, ["host"] * num_ranks)
    made = make_plan(settings, 0.1, [examples // len(sizes)] * len(sizes), "toys", sizes)
    return resumed_plan(made, meta, settings, num_ranks)


def test_the_plan_of_the_first_ranks_goes_on_whatever_their_number():
    made = resumed(640, None, 2, epochs=4)
    assert (made.steps_per_epoch, made.num_steps, made.is_resized) == (10, 40, False)
    for num_ranks in (1, 3):
        later = resumed(640, saved(made, 13), num_ranks, epochs=4)
        assert later == made.on(num_ranks)
        assert (later.position(13), later.num_steps, later.peak_learning_rate) == ((1, 3), 40, 0.2)
        assert resumed(640, saved(later, 27), 2, epochs=4) == made, (
            "back on as many ranks as before"
        )
    assert resumed(640, saved(made, 13), 2, epochs=4, resize="scale") == made, (
        "the same number of ranks"
    )


def test_scaled_at_the_end_of_an_epoch():
    """2 epochs of 20 steps on one rank, then 2 of 10 on two; rate and schedule as if there had been two all along."""
    made = resumed(640, None, 1, epochs=4)
    later = resumed(640, saved(made, 40), 2, epochs=4, resize="scale")
    assert (later.global_batch, later.steps_per_epoch, later.peak_learning_rate) == (64, 10, 0.2)
    assert (later.position(40), later.num_steps, later.scheduled_steps, later.shift) == (
        (2, 0),
        60,
        40,
        20,
    )
    assert later.num_epochs == 4 and not later.ends_early
    assert resumed(640, saved(later, 53, shift=20), 2, epochs=4, resize="scale") == later
    back = resumed(640, saved(later, 50, shift=20), 1, epochs=4, resize="scale")
    assert (back.position(50), back.num_steps, back.shift) == ((3, 0), 70, -10)


def test_steps_are_the_total_whatever_the_number_of_ranks():
    made = resumed(640, None, 1, steps=30)
    later = resumed(640, saved(made, 20), 2, steps=30, resize="scale")
    assert (later.steps_per_epoch, later.num_steps) == (10, 30)


def test_scaled_within_an_epoch_that_is_ended_first():
    made = resumed(640, None, 2, epochs=4)
    later = resumed(640, saved(made, 13), 4, epochs=4, resize="scale")
    assert (later.global_batch, later.num_steps, later.ends_early, later.batch_sizes) == (
        64,
        20,
        True,
        [16] * 4,
    )
    assert later.peak_learning_rate == 0.2 and later.scheduled_steps == 40
    assert (later.run_steps, later.run_epochs, later.num_epochs) == (40, 4, 2), (
        "progress is the run's"
    )
    after = resumed(640, saved(later, 20), 4, epochs=4, resize="scale")
    assert (after.global_batch, after.position(20), after.num_steps) == (128, (2, 0), 30)
    last = resumed(640, saved(made, 33), 4, epochs=4, resize="scale")
    assert (last.num_steps, last.ends_early) == (40, False), "nothing is left for another plan"
    assert resumed(640, saved(made, 40), 4, epochs=4, resize="scale").num_steps == 40


def test_ranks_and_batch_size_do_not_change_at_once():
    meta = saved(resumed(640, None, 2), 13)
    with pytest.raises(
        CheckpointError, match=r"began with train.batch_size=32 on 2 ranks, and now it is 16 on 4;"
    ):
        resumed(640, meta, 4, batch_size=16)
    assert resumed(640, meta, 2, batch_size=16).global_batch == 32, (
        "refused where it is compared: resuming"
    )
    listed = saved(resumed(640, None, 2, batch_size=[24, 8]), 3, batch_size=[24, 8])
    assert resumed(640, listed, 4, batch_size=[24, 8]).batch_sizes == [8] * 4
