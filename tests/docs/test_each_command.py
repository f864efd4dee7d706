"""Every command of the pages that no other test runs, in small: the commands of a page in one folder, in its order."""

import re

import pytest
from test_commands import PAGES

from launching import ROOT, run, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STARTS = re.compile(
    r"^(?:[\w./]*scripts/|python -m hvtrain|horovodrun|CUDA|PYTHONPATH|CXXFLAGS"
    r"|for |docker|s\d\$|uv |pip|spark-|source <)"
)
# By how a command begins, after ./scripts/run: the test that runs it, or why none can.
ELSEWHERE = {
    "horovodrun -np 2 python -m hvtrain  ": "tests/docs/test_readme.py",
    "horovodrun -np 2 python -m hvtrain run.dir=runs/first": "tests/docs/test_readme.py",
    "PYTHONPATH=. horovodrun -np 2 python -m hvtrain --config-dir conf": "tests/docs/test_readme.py",
    "horovodrun -np 16 -H": "tests/launch/test_many_hosts.py",
    "CXXFLAGS=": "test_the_packages_install_into_an_environment_of_ones_own, below",
    "pytest": "these are the tests",
    "./scripts/gpu-suite": "needs GPUs",
    "scripts/install-test-tools": "comes before the tests",
    "pre-commit install": "changes the clone",
    "mkdocs build": "tests/docs/test_site.py",
    "python -m hvtrain.doctor -H": "tests/doctor/test_doctor.py",
    "s1$ ": "tests/launch/test_by_hand.py",
    "s2$ ": "tests/launch/test_by_hand.py",
    "scripts/lab ": "tests/launch/test_lab.py",
    "docker ": "needs Docker; tests/scripts/test_image_steps.py runs the steps of the image",
    "python -m hvtrain.launch -np 4 -H s1:2,s2:2,s3:2 --max-restarts": "tests/launch/test_launch_faults.py",
    "horovodrun --gloo -np 4 --min-np 2": "tests/strategies/test_elastic_faults.py",
    "horovodrun --gloo -np 2 --min-np 1": "tests/docs/test_readme.py",
    "pip install libcst": "scripts/install-test-tools",
    "uv pip install --no-deps": "scripts/install-test-tools",
    "python -m hvtrain.migrate": "tests/migrate/test_migrate.py",
    "horovodrun -np 2 python train.py": "tests/migrate/test_migrate.py",
    "horovodrun -np 2 python -m hvtrain.verify": "tests/verify/test_verify.py",
    "python -m hvtrain.plan -np 8 --measure": "tests/plan/test_plan.py",
    "python -m hvtrain strategy=mirrored": "needs GPUs: tests/gpu/test_gpu_runs.py",
    "spark-submit": "tests/launch/test_spark.py, without YARN",
    "source <(python -m hvtrain.completion": "tests/test_completion.py",
}
# What makes the rest short.
IN_SMALL = {
    "hvtrain": "train.steps=2 run.report=false",
    "hvtrain.launch": "train.steps=2 run.report=false",
    "hvtrain.compare": "--speed-only --rounds 1 --speed-steps 2 train.batch_size=4",
    "hvtrain.find_lr": "--steps 10",
    "hvtrain.find_batch": "--largest 16 --steps 1",
    "hvtrain.sweep": "trials=2 train.epochs=1",
    "hvtrain.bench": "--rounds 1",
}
BENCH = {
    "steps": "--steps 2",
    "allreduce": "--largest 1",
    "scaling": "-np 1,2 --steps 2",
    "input": "--images 64 --sizes 224x224 --steps 2",
    "startup": "",
}
# Other tests have hosts and the data.
STAND_INS = (
    (r" -H \S+| --hostfile \S+", ""),
    (r"-np (?:4|8)\b(?! .*parameter_server)", "-np 2"),
    (r" \.\.\.", " dataset=synthetic 'dataset.image_shape=[32,32,3]'"),
    (r"(hvtrain.bench steps)", r"\1 --contenders hvtrain-mpi"),
    (r"(hvtrain.launch)(?= .* cluster=)", r"\1 --dry-run"),
    (r"for batch in 256 512", "for batch in 256"),
    (r"dataset=(?:mnist|cifar10)", "dataset=fashion_mnist"),
    (r"dataset=image_folder dataset.dir=\S+", "dataset=synthetic"),
)


def commands(text):
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        joined = re.sub(r"\\\n\s*", "", block if language in ("", "console") else "")
        for line in re.sub(r"; do\n(.*)\ndone", r"; do \1; done", joined).splitlines():
            if STARTS.match(line.removeprefix("$ ")):
                yield line.removeprefix("$ ").removeprefix("./scripts/run ")


def elsewhere(command):
    return next((begin for begin in ELSEWHERE if command.startswith(begin)), None)


def in_small(command):
    """The command with less to do. Words at its end win over its own."""
    command = re.split(r"\s+#\s", command, maxsplit=1)[0]
    for pattern, stand_in in STAND_INS:
        command = re.sub(pattern, stand_in, command)
    _, module, word = re.search(r"python (-m )?([\w./]+) ?(\w*)", command).groups()
    more = "" if "debug=" in command else IN_SMALL.get(module, "")
    if module == "hvtrain.bench":
        more += " " + BENCH[word]
    loop, done = (command.removesuffix("; done"), "; done") if command.endswith("; done") else (command, "")
    return f"{loop} {more}{done}"


FOUND = {page.stem: list(commands(page.read_text())) for page in (*PAGES, ROOT / "CONTRIBUTING.md")}
SMALL = {name: [line for line in lines if not elsewhere(line)] for name, lines in FOUND.items()}
# These take minutes.
LONG = ("bench", "compare", "input", "trackers", "CONTRIBUTING")


def pages():
    for name, lines in SMALL.items():
        if lines:
            yield pytest.param(name, marks=pytest.mark.release if name in LONG else pytest.mark.nightly)


@pytest.mark.parametrize("page", pages())
def test_the_commands_of_a_page(page, tmp_path):
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    if page == "report":
        for name in ("first", "second", "third"):
            code, output = train(None, 1, "strategy=single", "train.steps=2", f"run.dir=runs/{name}", cwd=tmp_path)
            assert code == 0, output
    for command in SMALL[page]:
        code, output = run(None, 1, "bash", "-ec", in_small(command), cwd=tmp_path, timeout=800)
        assert code == 0, f"{command}\nas {in_small(command)}\n{output}"


def test_each_command_is_run_or_stands_with_its_reason():
    lines = [line for lines in FOUND.values() for line in lines]
    assert {elsewhere(line) for line in lines} - {None} == set(ELSEWHERE)
    missing = [name for text in ELSEWHERE.values() for name in re.findall(r"[\w/-]+/[\w./-]+", text)]
    assert [name for name in missing if not (ROOT / name).exists()] == []


@pytest.mark.release
def test_the_packages_install_into_an_environment_of_ones_own(tmp_path):
    (line,) = [line for line in FOUND["README"] if line.startswith("CXXFLAGS=")]
    own = tmp_path / "own"
    made = f"git clone -q {ROOT} clone && cd clone && uv venv -q {own} && {line.replace('YOUR_ENVIRONMENT', str(own))}"
    code, output = run(None, 1, "bash", "-ec", made, cwd=tmp_path, timeout=850)
    assert code == 0, output
    line = f"env -u OPAL_PREFIX -u PYTHONPATH {own}/bin/python -m hvtrain.launch -np 2 -- model=mlp train.steps=2"
    code, output = run(None, 1, *line.split(), cwd=tmp_path, PATH="/usr/bin:/bin")
    assert code == 0, output
    assert "reductions 2 of 2 steps; weights equal on 2/2 ranks" in output
