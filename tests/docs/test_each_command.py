"""Every command of the pages that no other test runs, in small: the commands of a page in one folder, in its order."""

import json
import re

import pytest
import test_data_page
import test_pages
import test_use_page

from launching import ROOT, run, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STARTS = re.compile(
    r"^(?:[\w./]*scripts/|python |horovodrun |CUDA|PYTHONPATH|CXXFLAGS"
    r"|for |docker|s\d\$|uv |pip |spark-|source |bash |export |git |mkdir |cd )"
)
# tests/docs/test_tutorial.py follows every line of that page; these run the commands that they find on theirs.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {page.stem: page.read_text() for page in PAGES if page.stem != "tutorial"}
OTHERS = {*(line for _, line in test_pages.COMMANDS), *test_data_page.COMMANDS, *test_use_page.COMMANDS}
# By how a command begins, after ./scripts/run: the test that runs it, or why none can.
ELSEWHERE = {
    "horovodrun -np 2 python -m hvtrain  ": "tests/docs/test_readme.py",
    "horovodrun -np 2 python -m hvtrain run.dir=runs/first": "tests/docs/test_readme.py",
    "PYTHONPATH=. horovodrun -np 2 python -m hvtrain --config-dir conf": "tests/docs/test_readme.py",
    "horovodrun -np 16 -H": "tests/launch/test_many_hosts.py",
    "CXXFLAGS=": "test_the_packages_install_into_an_environment_of_ones_own, below",
    "horovodrun -np 2 python -m hvtrain model=keras_hub": "tests/docs/test_keras_hub_page.py",
    "pytest": "these are the tests",
    "bash .ci/run": "runs the tests",
    "source .venv/bin/activate": "the tests run in an environment already",
    "export HVTRAIN_NOTIFY": "sends to other hosts; tests/notices/test_notices_of_runs.py has receivers of its own",
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
    "pip install libcst": "scripts/install-test-tools",
    "uv pip install --no-deps": "scripts/install-test-tools",
    "python -m hvtrain.migrate": "tests/migrate/test_migrate.py",
    "horovodrun -np 2 python train.py": "tests/migrate/test_migrate.py",
    "horovodrun -np 2 python -m hvtrain.verify": "tests/verify/test_verify.py",
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
    (r"^(?!.*cluster=)(.*) -H \S+", r"\1"),
    (r"(?<!plan) -np (?:4|8)\b(?! .*parameter_server)", " -np 2"),
    (r" \.\.\.", " dataset=synthetic 'dataset.image_shape=[32,32,3]'"),
    (r"(hvtrain.bench steps)", r"\1 --contenders hvtrain-mpi"),
    (r"(hvtrain.launch)(?! --dry-run)(?= .* cluster=)", r"\1 --dry-run"),
    (r"for (batch|seed) in (\d+)[ \d]*", r"for \1 in \2"),
    (r"dataset=(?:mnist|cifar10)", "dataset=fashion_mnist"),
    (r"experiment=shapes_deeplab", r"\g<0> dataset.num_train=16 dataset.num_test=8"),
)


def commands(text):
    """Each line of a block that begins with a command, other lines that look like one, and what follows a prompt."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        block = re.sub(r"\\\n\s*", "", block)
        block = re.sub(r"^for .*?^done$", one_line, block, flags=re.MULTILINE | re.DOTALL)
        for line in block.splitlines() if language in ("", "console") else ():
            if line.startswith("$ ") or (not language and line and (STARTS.match(block) or STARTS.match(line))):
                yield line.removeprefix("$ ").removeprefix("./scripts/run ")


def one_line(loop):
    return re.sub(r"\n\s*", "; ", re.sub(r"; do\n\s*", "; do ", loop[0]))


def elsewhere(command):
    return next((begin for begin in ELSEWHERE if command.startswith(begin)), None)


def in_small(command):
    """The command with less to do. Words at its end win over its own."""
    command = re.split(r"\s+#\s", command, maxsplit=1)[0]
    for pattern, stand_in in STAND_INS:
        command = re.sub(pattern, stand_in, command)
    found = re.search(r"python (?:-m )?([\w./]+) ?(\w*)", command)
    module, word = found.groups() if found else ("", "")
    more = "" if "debug=" in command else IN_SMALL.get(module, "")
    if module == "hvtrain.bench":
        more += " " + BENCH[word]
    command, done = re.fullmatch(r"(.*?)((?:; done)*)", command).groups()
    return f"{command} {more}{done}"


def stand_ins(page, folder):
    """What a page supposes: its files of Python, hosts for elastic jobs, measurements and finished runs."""
    (folder / "scripts").symlink_to(ROOT / "scripts")
    for name, text in re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL):
        (folder / name).write_text(text)
    (folder / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (folder / "hosts.sh").chmod(0o755)
    for name, num_ranks in (("two", 2), ("four", 4)):
        seconds = {str(size): [1e-4 + size / 1e9] * 3 for size in (4, 4096, 1 << 20, 1 << 26)}
        (folder / "bench" / name).mkdir(parents=True)
        measured = {"num_ranks": num_ranks, "seconds": {"hvtrain": seconds}}
        (folder / "bench" / name / "allreduce.json").write_text(json.dumps(measured))
    for name in ("first", "second", "third") if page == "report" else ():
        code, output = train(None, 1, "strategy=single", "train.steps=2", f"run.dir=runs/{name}", cwd=folder)
        assert code == 0, output


FOUND = {name: [line for line in commands(text) if line not in OTHERS] for name, text in PAGES.items()}
SMALL = {name: [line for line in lines if not elsewhere(line)] for name, lines in FOUND.items()}
# These take minutes.
LONG = ("bench", "compare", "input", "segmentation", "trackers", "CONTRIBUTING")


def pages():
    for name, lines in SMALL.items():
        if lines:
            yield pytest.param(name, marks=pytest.mark.release if name in LONG else pytest.mark.nightly)


@pytest.mark.parametrize("page", list(pages()))
def test_the_commands_of_a_page(page, tmp_path):
    stand_ins(page, tmp_path)
    for command in SMALL[page]:
        code, output = run(None, 1, "bash", "-ec", in_small(command), cwd=tmp_path, timeout=800)
        assert code == 0, f"{command}\nas {in_small(command)}\n{output}"


def test_each_command_is_run_or_stands_with_its_reason():
    lines = [line for lines in FOUND.values() for line in lines]
    assert {elsewhere(line) for line in lines} - {None} == set(ELSEWHERE)
    languages = {word for text in PAGES.values() for word in re.findall(r"^```(\w+)$", text, re.MULTILINE)}
    assert languages <= {"console", "python", "yaml"}, "commands stand in blocks of no language, or of a console"
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
