"""Summary of a run, logged before its first step."""

import keras

from hvtrain.core.step_plan import StepPlan
from hvtrain.restore.resume import Start
from hvtrain.system.versions import versions
from hvtrain.training.run import Run


def summary(run: Run, model: keras.Model, start: Start) -> str:
    """Some ten lines, without the closing newline."""
    config, strategy, source, plan = run.config, run.strategy, run.source, run.plan
    splits = {split: source.num_examples(split) for split in ("train", "validation", "test")}
    rate = f"{plan.base_learning_rate:g} x {plan.learning_rate_factor:g} = {plan.peak_learning_rate:g}"
    sizes, accumulate = plan.batch_sizes, plan.accumulate
    batch, by = " + ".join(map(str, sizes)), "by rank"
    if len(set(sizes)) == 1:
        batch, by = f"{plan.size} x {sizes[0]}", "ranks x batch"
    joint = f"; {accumulate} of them for each change of weights, {accumulate * plan.global_batch} in all"
    lines = {
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        "ranks": f"{plan.size} ({strategy.description()})",
        "devices": device_map(strategy.devices()),
        "model": f"{config.model['_target_']}, {model.count_params():,} parameters, {config.train.precision}",
        "dataset": f"{source.name}: {', '.join(f'{count:,} {split}' for split, count in splits.items() if count)}",
        "from": source.origin,
        "global batch": f"{batch} = {plan.global_batch} ({by}){joint * (accumulate > 1)}",
        "learning rate": f"{rate} (base x {config.train.learning_rate_scale} scale), "
        f"{config.schedule['_target_'].split('.')[-1].lower()}",
        "steps": f"{plan.num_steps:,} ({plan.steps_per_epoch:,} an epoch)",
        "run folder": str(run.folder),
    }
    if start.name:
        lines["resumed"] = f"{start.name}: {start.step:,} of {plan.num_steps:,} steps were done{resized(start, plan)}"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items() if text) + "\n"


def resized(start: Start, plan: StepPlan) -> str:
    """Consequences of resuming on another number of ranks; empty for the same number."""
    ranks = f", on {start.num_ranks} rank{'s' * (start.num_ranks > 1)}; on {plan.size} now"
    batch = f"global batch {plan.global_batch}"
    if start.plan_ranks != len(plan.shares):
        rate, epoch = f"learning rate {plan.peak_learning_rate:g}", plan.position(start.step)[0] + 1
        return f"{ranks}: {batch} and {rate} from epoch {epoch} on (train.resize=scale)"
    if start.num_ranks == plan.size:
        return ""
    parts = f" ({' + '.join(map(str, plan.batch_sizes))})" if plan.size > 1 else ""
    end = f" up to step {plan.num_steps:,}, then train.resize=scale" if plan.ends_early else ""
    return f"{ranks}: {batch} and learning rate as before{parts}{end}"


def device_map(devices: list[str]) -> str:
    """Ranks and their devices, the ranks of one device together: "0-3 s1 CPU"."""
    ranks: dict[str, list[str]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(str(rank))
    return ", ".join(f"{'-'.join(dict.fromkeys([own[0], own[-1]]))} {device}" for device, own in ranks.items())
