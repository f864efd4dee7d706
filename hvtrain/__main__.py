"""Entry point of `python -m hvtrain`: runs the command named by the first word (core/commands.py).

Without a command, it trains a model with the settings that are given as NAME=VALUE.
"""

import sys

from hvtrain.config.choices import run_settings
from hvtrain.config.compose import composed
from hvtrain.core import VERSION, commands
from hvtrain.errors import ConfigError
from hvtrain.system import console
from hvtrain.system.command import Parser, enter

DESCRIPTION = """\
Without a command: trains a Keras model in one process, or in as many as a launcher starts.

settings that are changed most often, with their defaults (all others are listed below):
  dataset=digits                  the data; its own settings: python -m hvtrain dataset=table --help
  model=cnn                       the network
  train.epochs=12                 passes over the training data
  train.batch_size=32             examples per step and rank
  optimizer=adam                  its own settings: optimizer.NAME=VALUE
  optimizer.learning_rate=0.001   for one rank; train.learning_rate_scale scales it for all ranks
  schedule=constant               the learning rate over the steps
  augment=[]                      layers that change training images
  callbacks=[]                    more Keras callbacks, such as early_stopping
  run.dir=null                    where results go; the same command resumes from there"""
EXAMPLES = """\
examples:
  python -m hvtrain                                             one process, for debugging
  horovodrun -np 2 python -m hvtrain                            two ranks on this host
  horovodrun -np 16 -H s1:4,s2:4,s3:4,s4:4 python -m hvtrain    four hosts with four GPUs each
  mpirun -np 2 python -m hvtrain                                the same without horovodrun
"""


def main() -> None:
    """Runs the command line and exits."""
    name = commands.first_word(sys.argv[1:])
    if name:
        enter(lambda: commands.run_command(name))
    else:
        console.take_signals(console.end_before_training)  # Until runner.fit makes an Interruption.
        enter(compose_and_run)


def compose_and_run() -> int:
    """Composes the settings with Hydra, checks them, and trains."""
    parser = Parser(
        "python -m hvtrain",
        usage="%(prog)s [COMMAND] [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description=DESCRIPTION,
        epilog=f"commands (python -m hvtrain COMMAND --help):\n{commands.help_text()}\n\n{EXAMPLES}",
        more_help=lambda: run_settings(sys.argv),
    )
    parser.add_argument("--version", action="version", version=f"hvtrain {VERSION}")
    parser.add_argument("--cfg", metavar="job", help="print the composed settings and exit")
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="add a folder with choices of your own for these groups; may be given several times",
    )
    parser.parse_known_args()  # Handles --help and --version; Hydra parses the rest.
    if {"-m", "--multirun"} & set(sys.argv):
        raise ConfigError(
            "--multirun asks for several runs in one process; use one command for each run instead"
        )
    config = composed()
    if console.launched_rank() == 0:
        # The import below takes seconds, and horovodrun has printed nothing so far.
        print(f"hvtrain {VERSION}: loading TensorFlow ...", flush=True)
    with console.quiet_import(config.verbose):
        from hvtrain.runner import train
    train(config)
    return 0


if __name__ == "__main__":
    main()
