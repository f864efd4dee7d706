"""`python -m hvtrain generate`: continues a text with a finished run of task=language."""

from hvtrain.errors import ConfigError
from hvtrain.finished.arguments import parse_command
from hvtrain.system import console
from hvtrain.system.command import at_least, not_negative

EXAMPLES = """\
  python -m hvtrain generate run=runs/tales "prompt=The statement" --tokens 100 --temperature 0.5
"""


def main() -> int:
    """Opens the run in this process and prints the prompt with its continuation."""
    options, finished = parse_command(
        "generate",
        "prompt=TEXT [checkpoint=best|last] [OPTION ...]",
        "Prints the prompt and the trained model's continuation. The same seed gives the same text.",
        EXAMPLES,
        "prompt",
        tokens={"type": at_least(1), "default": 64, "metavar": "N", "help": "most tokens to write; default: 64"},
        temperature={"type": not_negative, "default": 0.7, "metavar": "T", "help": "default: 0.7; 0: greedy"},
        seed={"type": at_least(0), "default": 0, "metavar": "N", "help": "of the sampling; default: 0"},
    )
    prompt = finished.arguments.get("prompt")
    if not prompt:
        raise ConfigError("prompt=TEXT is missing; give the beginning of a text, in quotes")
    if console.is_launched():
        raise ConfigError("generate runs in one process; start python -m hvtrain generate without a launcher")
    with console.quiet_import(finished.config.verbose):
        from hvtrain.finished.finished_run import on_ranks, open_run
        from hvtrain.strategies.base import Strategy
        from hvtrain.tasks.language import continuation

    with on_ranks(finished.config, Strategy()) as strategy:
        run = open_run(finished, strategy, uses_split=False)
        source = run.source
        tokens = source.tokens_of(prompt)
        facts = source.facts()
        # A model that is not causal has seen what comes after each token, so it cannot continue a text.
        if not tokens or not facts.get("causal"):
            raise ConfigError(
                f"the run of {source.name} has no tokenizer, or is not causal; choose one of dataset=text"
            )

        written = continuation(
            run.model,
            tokens,
            options.tokens,
            facts["length"],
            options.temperature,
            options.seed,
            source.end_token,
        )
        print(source.text_of([*tokens, *written]))

    return 0
