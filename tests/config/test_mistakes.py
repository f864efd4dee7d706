"""The mistakes of a new user's first hours: each is one line that says what came and what to write instead."""

import copy
import functools
import re
import shlex
import sys

from hvtrain.config import compose as composing
from hvtrain.config import mistakes
from hvtrain.config.compose import compose
from in_process import run_command

LONG = 10_000 * "x"
# A command line of `python -m hvtrain`, and what it is answered; `...` stands for the rest of a line.
SUGGESTIONS = {
    "lr=0.1": "unknown setting 'lr'; did you mean 'optimizer.learning_rate'?",
    "optimizer.lr=0.1": "unknown setting 'optimizer.lr'; did you mean 'optimizer.learning_rate'?",
    "train.lr=0.1": "unknown setting 'train.lr'; did you mean 'optimizer.learning_rate'?",
    "train.learning_rate=0.1": "unknown setting 'train.learning_rate'; did you mean 'optimizer.learning_rate'?",
    "optimizer.learningrate=3": "unknown setting 'optimizer.learningrate'; did you mean 'optimizer.learning_rate'?",
    "bs=64": "unknown setting 'bs'; did you mean 'train.batch_size'?",
    "batch_size=64": "unknown setting 'batch_size'; did you mean 'train.batch_size'?",
    "dataset.batch_size=64": "unknown setting 'dataset.batch_size'; did you mean 'train.batch_size'?",
    "train.batchsize=64": "unknown setting 'train.batchsize'; did you mean 'train.batch_size'?",
    "epochs=3": "unknown setting 'epochs'; did you mean 'train.epochs'?",
    "epoch=3": "unknown setting 'epoch'; did you mean 'train.epochs'?",
    "num_epochs=3": "unknown setting 'num_epochs'; did you mean 'train.epochs'?",
    "TRAIN.EPOCHS=3": "unknown setting 'TRAIN.EPOCHS'; did you mean 'train.epochs'?",
    "trian.epochs=3": "unknown setting 'trian.epochs'; did you mean 'train.epochs'?",
    "+train.epocs=3": "unknown setting 'train.epocs'; did you mean 'train.epochs'?",
    "dropout=0.1": "unknown setting 'dropout'; did you mean 'model.dropout'?",
    "model.dropuot=0.1": "unknown setting 'model.dropuot'; did you mean 'model.dropout'?",
    "model.units=64": "unknown setting 'model.units'; model.hidden is a setting of model=mlp, two_tower alone; ...",
    "model.layers=3": "unknown setting 'model.layers'; model.hidden is a setting of model=mlp, two_tower alone; ...",
    "model=transformer model.layers=4": "unknown setting 'model.layers'; did you mean 'model.blocks'?",
    "model=transformer model.units=64": "unknown setting 'model.units'; did you mean 'model.width'?",
    "model=dlrm model.hidden_units=[64]": "unknown setting 'model.hidden_units'; did you mean 'model.top'?",
    "model=mlp model.units=64": "unknown setting 'model.units'; did you mean 'model.hidden'?",
    "model=mlp model.layers=[64]": "unknown setting 'model.layers'; did you mean 'model.hidden'?",
    "task.loss.fromlogits=true": "unknown setting 'task.loss.fromlogits'; did you mean 'task.loss.from_logits'?",
    "modle=cnn": "unknown setting 'modle'; did you mean 'model'?",
    "Model=cnn": "unknown setting 'Model'; did you mean 'model'?",
    "gpus=4": "unknown setting 'gpus'; the launcher sets the number of ranks: horovodrun -np 2 python -m hvtrain ...",
    "train.workers=4": "unknown setting 'train.workers'; the launcher sets the number of ranks: horovodrun -np 2 ...",
    "optimizer.amsgrad=true": "unknown setting 'optimizer.amsgrad'; optimizer has learning_rate, ...",
    "task.metrics.top3._target_=keras.metrics.TopKCategoricalAccuracy": (
        "unknown setting 'task.metrics.top3._target_'; task.metrics has accuracy; add a new one with a plus: "
        "+task.metrics.top3._target_=VALUE"
    ),
    "task=custom task.metrics={error:{_target_:keras.metrics.MeanAbsoluteError}}": (
        "unknown setting 'task.metrics.error'; task.metrics has no settings; add a new one with a plus: "
        "+task.metrics.error=VALUE"
    ),
    "dataset.dir=/data": "unknown setting 'dataset.dir'; dataset.dir is a setting of dataset=cifar10, ...",
    "optimizer.rho=0.9": (
        "unknown setting 'optimizer.rho'; optimizer.rho is a setting of optimizer=rmsprop alone; choose one of ..."
    ),
    "callbacks.early_stopping.patience=3": (
        "unknown setting 'callbacks.early_stopping.patience'; callbacks.early_stopping.patience is a setting of ..."
    ),
    "data_dir=x": "unknown setting 'data_dir'; dataset.dir is a setting of dataset=..., image_folder, ...",
    "dataset=image_folder data_dir=x": "unknown setting 'data_dir'; did you mean 'dataset.dir'?",
    "dataset=table dataset.path=x": "unknown setting 'dataset.path'; did you mean 'dataset.file'?",
    "dataset=table dataset.dir=x": "unknown setting 'dataset.dir'; did you mean 'dataset.file'?",
    "train.metrics=[accuracy]": "unknown setting 'train.metrics'; add a metric with +task.metrics.NAME._target_=...",
    "train={epochs:3,foo:1}": "unknown setting 'train.foo'; known: train.accumulate, ...",
    "train.foo=1": "unknown setting 'train.foo'; known: train.accumulate, train.balance, ...",
    "+train.foo=1": "unknown setting 'train.foo'; known: train.accumulate, train.balance, ...",
    "foo=1": "unknown setting 'foo'; known: augment, callbacks, ...",
    "+foo=1": "unknown setting 'foo'; known: augment, callbacks, ...",
    "train.epochs.x=1": "unknown setting 'train.epochs.x'; ...",
}
CHOICES = {
    "optimizer=Adam": "optimizer=Adam is not one of adam, ...; did you mean optimizer=adam?",
    "optimizer=SGD": "optimizer=SGD is not one of adam, ...; did you mean optimizer=sgd?",
    "optimizer=adma": "optimizer=adma is not one of adam, ...; did you mean optimizer=adam?",
    "optimizer=ftrl": "optimizer=ftrl is not one of adam, ...; --help describes them",
    "model=ResNet50": (
        "model=ResNet50 is not one of ...; did you mean model=resnet50? (for a network of keras.applications: "
        "model=application model.name=ResNet50)"
    ),
    "model=EfficientNetB0": "model=EfficientNetB0 is ... model=application model.name=EfficientNetB0)",
    "model=resnext": "model=resnext is not one of application, cnn, deeplabv3plus, dlrm, keras_hub, mlp, ...",
    "dataset=MNIST": "dataset=MNIST is not one of cifar10, ...; did you mean dataset=mnist?",
    "dataset=cifar": "dataset=cifar is not one of cifar10, ...; did you mean dataset=cifar10?",
    "schedule=cosin": "schedule=cosin is not one of constant, ...; did you mean schedule=cosine?",
    "strategy=horovd": "strategy=horovd is not one of diloco, ...; did you mean strategy=horovod?",
    "task=clasification": "task=clasification is not one of binary, ...; did you mean task=classification?",
    "tracker=wandbb": "tracker=wandbb is not one of mlflow, tensorboard, wandb; did you mean tracker=wandb?",
    "callbacks=early_stoping": "callbacks=early_stoping is not one of ...; did you mean callbacks=early_stopping?",
    "callbacks=[reduce_lr]": "callbacks=reduce_lr is not one of early_stopping, reduce_lr_on_plateau; ...",
    "augment=random_flipp": "augment=random_flipp is not one of cut_mix, ...; did you mean augment=random_flip?",
    "debug=fsat": "debug=fsat is not one of fast, nan, overfit, profile; did you mean debug=fast?",
    "experiment=imagenet": "experiment=imagenet is not one of digits_multilabel, ...",
    "model=null": "model=null is not one of application, ...",
    "model=": "model= is not one of application, ...",
    "model=3": "model=3 is not one of application, ...",
    "model=[cnn,mlp]": "model=[cnn,mlp] has several choices, and a run has one model; write model=NAME",
    "model=cnn,mlp": "model=cnn,mlp has several values; give one, a list (model=[cnn,mlp]), or quote it: ...",
    "~model": "~model removes what every run needs; leave it out, or write model=VALUE",
    "~task": "~task removes what every run needs; leave it out, or write task=VALUE",
    "~train.epochs": "~train.epochs removes what every run needs; leave it out, or write train.epochs=VALUE",
    "~optimizer.momentum": "~optimizer.momentum matches no setting of this run; leave it out",
    "+train.epochs=3": "train.epochs exists already; write it without a plus: train.epochs=VALUE",
    "+model=mlp": "model exists already; write it without a plus: model=VALUE",
    "++model=mlp": "model exists already; write it without a plus: model=VALUE",
    "model/cnn=1": "unknown setting 'model/cnn'; ...",
}
FORM = {
    "--epochs 3": "unknown option --epochs; did you mean 'train.epochs'?",
    "--lr=0.1": "unknown option --lr=0.1; did you mean 'optimizer.learning_rate'?",
    "--batch-size 64": "unknown option --batch-size; did you mean 'train.batch_size'?",
    "--model cnn": "unknown option --model; did you mean 'model'?",
    "--nonsense": "unknown option --nonsense; see python -m hvtrain --help",
    "-np 2": "unknown option -np; the launcher sets the number of ranks: horovodrun -np 2 python -m hvtrain ...",
    "--cfg all": "argument --cfg/-c: invalid choice: 'all' (choose from ...",
    "--config-dir nowhere": "--config-dir nowhere is not a folder; give the one that holds your groups, such as model/",
    "--multirun seed=1,2": "--multirun asks for several runs in one process; use one command for each run instead",
    "train.epochs: 3": "'train.epochs:' is not a setting; write SETTING=VALUE in one word, such as train.epochs=3",
    "train.epochs = 3": "'train.epochs' is not a setting; write SETTING=VALUE in one word, such as train.epochs=3",
    "=3": "'=3' is not a setting; write SETTING=VALUE in one word, such as train.epochs=3",
    "trian model=cnn": "trian is not a command (the commands are ...",
    "hydra.run.dir=x": "hydra.run.dir=x is a setting of Hydra, which a run does not use; set the run folder with ...",
    "+hydra.foo=1": "+hydra.foo=1 is a setting of Hydra, ...",
    "seed=1,2": "seed=1,2 has several values; give one, a list (seed=[1,2]), or quote it: \"seed='1,2'\"",
    "'seed=range(1,3)'": "seed=range(1,3) asks for several runs; use a command for each, or python -m hvtrain sweep",
    "'run.name=${oc.env:NOPE}'": "run.name cannot be resolved: Environment variable 'NOPE' not found; ...",
    "'run.name=${nothing}'": "run.name cannot be resolved: Interpolation key 'nothing' not found; ...",
    "'run.name=${nope:1}'": "run.name cannot be resolved: ...",
    "'run.name=${seed'": "run.name=${seed has a character that is special to Hydra; put it in quotes: ...",
    "'train.epochs=[1'": "train.epochs=[1 has a character that is special to Hydra; put it in quotes: ...",
    "'run.name=my (first) run'": "run.name=my (first) run has a character that is special to Hydra; put it in ...",
}
VALUES = {
    "train.epochs=many": "train.epochs=many is not a whole number",
    "train.epochs=3.5": "train.epochs=3.5 is not a whole number",
    "train.epochs=": "train.epochs= is not a whole number",
    "train.epochs=null": "train.epochs=None is not a whole number",
    "train.epochs=0": "train.epochs=0 is out of range; it must be at least 1",
    "train.batch_size=-4": "train.batch_size=-4 is out of range; it must be at least 1",
    "train.precision=fp16": "train.precision=fp16 is not one of float32, mixed_bfloat16, mixed_float16",
    "train.max_time=5": "train.max_time=5 is not a duration; write it as 11h50m, 45m or 90s",
    "train.ema=2": "train.ema=2.0 is out of range; it must be between 0 and 1, such as 0.999",
    "train=3": "train=3 is not a group of settings; write train.NAME=VALUE for each",
    "metrics=[accuracy]": "metrics=[accuracy] does not name metrics; add a metric with +task.metrics.NAME._target_=...",
    "train=[3]": "train=[3] is not a group of settings; write train.NAME=VALUE for each",
    "optimizer.learning_rate=-1": "optimizer.learning_rate=-1 is not a finite number above 0; give the rate ...",
    "optimizer.learning_rate=fast": "optimizer.learning_rate=fast is not a finite number above 0; give the rate ...",
    "model._target_=cnn": "model._target_='cnn' names no class or function; it must be a dotted path such as ...",
    "dataset=image_folder": "dataset.dir is not set and has no default; give dataset.dir=VALUE",
    "train.accumulate=2 train.steps=5": "train.steps=5 is not a multiple of train.accumulate=2; choose 4 or 6",
    "train.epochs='\x1b[31m'": "...",
    "\"train.epochs='a\x1b[31mb'\"": r"train.epochs=a\x1b[31mb is not a whole number",
    f"train.epochs={LONG}": "train.epochs=xxxx...xxxx is not a whole number",
    f"run.name=({LONG}": "run.name=... has a character that is special to Hydra; put it in quotes: \"run.name='...'\"",
    f"model={LONG}": "model=xxxx...; --help describes them",
}
COMMANDS = {
    "launch -np 0 -- model=mlp": "argument -np: 0 is not a whole number of at least 1; see ...",
    "launch -np two -- model=mlp": "argument -np: two is not a whole number of at least 1; see ...",
    "launch -np 2 -np 4 -- model=mlp": "-np was given 2 times; give it once",
    "launch -np 2": "the settings of the run are missing; write them after --, for example: -- model=cnn",
    "launch --np 2 -- model=mlp": "...",
    "launch -np 2 -- trian.epochs=2": "unknown setting 'trian.epochs'; did you mean 'train.epochs'?",
    "launch -np 2 -- --epochs 2": "unknown option --epochs; did you mean 'train.epochs'?",
    "launch -np 2 -- train.py": "'train.py' is not a run setting; a command of your own begins with python",
    "launch -H s1:0 -- model=mlp": "-H s1:0: 's1:0' is not a host and a number of ranks; write -H s1:4,s2:4",
    "launch cluster=slrum -- model=mlp": "cluster=slrum is not one of ssh, ...; did you mean 'slurm'?",
    "launch cluster=slurm cluster.tme=1 -- model=mlp": "unknown setting 'cluster.tme'; did you mean 'cluster.time'?",
}
# Files of a user's own experiments, and what choosing each is answered.
EXPERIMENTS = {
    "tab": (
        "# @package _global_\ntrain:\n\tepochs: 3\n",
        "own/experiment/tab.yaml, line 3, is not valid YAML; check its indentation (spaces, no tabs), ...",
    ),
    "open": (
        "# @package _global_\nmodel: {hidden: [1\n",
        "own/experiment/open.yaml, line 3, is not valid YAML; ...",
    ),
    "alone": (
        "train:\n  epochs: 3\n",
        "own/experiment/alone.yaml does not begin with # @package _global_, without which its settings are not ...",
    ),
    "late": (
        "# mine\n# @package _global_\ntrain:\n  epochs: 3\n",
        "own/experiment/late.yaml does not begin with # @package _global_, without which its settings are ...",
    ),
    "slash": (
        "# @package _global_\ndefaults:\n  - override model: mlp\n",
        "the defaults of experiment/slash.yaml have a choice in the wrong form; write - override ...",
    ),
    "list": (
        "# @package _global_\n- train\n",
        "experiment/list.yaml does not hold settings; write each as NAME: VALUE",
    ),
}
CHOSEN = {
    f"--config-dir own experiment={name}": f"...{answer}"
    for name, (_, answer) in EXPERIMENTS.items()
}
COMMANDS |= {
    "find_lr run.dir=x --output y": "run.dir=x and --output set the same folder; leave one of them out",
    "find_batch --output y run.dir=x": "run.dir=x and --output set the same folder; leave one of them out",
    "evaluate a run.dir=x": "run.dir=x: a finished run keeps its folder; leave run.dir out",
    "predict a run=b": "a and run=b are two runs; give one of them",
}
MISTAKES = {**CHOSEN, **SUGGESTIONS, **CHOICES, **FORM, **VALUES, **COMMANDS}


@functools.cache
def composed(*line):
    return compose([*line])


def copies(line):
    return copy.deepcopy(composed(*line))


def answers(line, expected):
    """True if the line is the expected one, where `...` stands for any text."""
    return re.fullmatch(".*".join(map(re.escape, expected.split("..."))), line)


def test_a_hundred_mistakes(tmp_path, monkeypatch):
    """No page of usage, no traceback, no text of Hydra's own, nothing written."""
    # Most lines are answered from the default choices, which are composed once.
    for name in ("check_form", "explain"):
        answer = getattr(mistakes, name)
        monkeypatch.setattr(
            composing, name, lambda *line, answer=answer: answer(*line[:-1], copies)
        )
    # What is not refused would train here.
    monkeypatch.setitem(sys.modules, "hvtrain.runner", None)
    assert len(MISTAKES) >= 100
    own = tmp_path / "own"
    (own / "experiment").mkdir(parents=True)
    for name, (text, _) in EXPERIMENTS.items():
        (own / f"experiment/{name}.yaml").write_text(text)
    wrong = []
    for line, expected in MISTAKES.items():
        code, output, errors = run_command("hvtrain", *shlex.split(line), cwd=tmp_path)
        is_one_line = (
            errors.startswith("hvtrain: ") and errors.count("\n") == 1 and len(errors) < 1100
        )
        message = errors.removeprefix("hvtrain: ").removesuffix("\n")
        if (code, output) != (2, "") or not is_one_line or not answers(message, expected):
            wrong.append(
                f"{line[:80]}: {code} {output[:200]}\n    {message[:1200]}\n    {expected}"
            )
    assert not wrong, "\n".join(wrong)
    assert list(tmp_path.iterdir()) == [own]
