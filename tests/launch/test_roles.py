"""Which processes a strategy needs, where they run, and what starts them. Strategies are known by their settings."""

import re
import shlex
import sys

import pytest

import launching
from hvtrain.core.topology import Roles, roles_of
from hvtrain.errors import ConfigError
from hvtrain.launch.command import main
from hvtrain.launch.first_failure import End, judge
from hvtrain.launch.job import (
    Job,
    hosts_option,
    launcher_command,
    parse_hosts,
    place_ranks,
)
from hvtrain.launch.restart import choose_hosts
from hvtrain.system.console import Verdict
from lab import Lab, needs_lab

CONFIGS = {
    "servers": "_target_: nowhere.Servers\nnum_ps: 1\n",
    "replicas": "_target_: nowhere.Replicas\nnum_replicas: null\n",
}
SAY = """
import os, pathlib, socket, sys, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
folder = pathlib.Path(sys.argv[1])
(folder / rank).write_text(socket.gethostname())
while sum(1 for _ in folder.iterdir()) < 4:
    time.sleep(0.05)
time.sleep(0.5)
sys.exit(3 if rank == "3" else time.sleep(150))
"""


@pytest.fixture
def would_run(monkeypatch, tmp_path, capsys):
    """What the launcher would run for these words, of which `strategy=` may name one of CONFIGS; starts nothing."""
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    for name, text in CONFIGS.items():
        (tmp_path / "conf" / "strategy" / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)

    def run(options, *arguments):
        own = (
            ["--config-dir", str(tmp_path / "conf")]
            if arguments and arguments[0].startswith("strategy=")
            else []
        )
        monkeypatch.setattr(sys, "argv", ["launch", *options.split(), "--", *own, *arguments])
        assert main() == 0
        return capsys.readouterr().out

    return run


def numbers(output):
    """-np and -H of the line that would run, and the strategy's settings in it."""
    arguments = shlex.split(output.partition("would run: ")[2].partition("\n")[0])
    changed = [argument for argument in arguments if argument.startswith("strategy.")]
    return arguments[arguments.index("-np") + 1], arguments[arguments.index("-H") + 1], changed


@pytest.mark.parametrize(
    ("options", "strategy", "expected"),
    [
        ("-np 3 -H s1:2,s2:2", "horovod", ("3", "s1:2,s2:1", [])),
        ("-H s1:2,s2:2", "servers", ("6", "s1:4,s2:2", [])),
        (
            "-np 4 -H s1:2,s2:2 --num-ps 2 --gloo",
            "servers",
            ("7", "s1:5,s2:2", ["strategy.num_ps=2"]),
        ),
        ("-np 1 -H s1:2,s2:2", "servers", ("3", "s1:3", [])),
        ("-np 2", "servers", ("4", "localhost:4", [])),
        ("-np 2 -H s1:4", "replicas", ("1", "s1:1", ["strategy.num_replicas=2"])),
        ("-H s1:4", "replicas", ("1", "s1:1", ["strategy.num_replicas=4"])),
        ("", "replicas", ("1", "localhost:1", [])),
    ],
)
def test_how_many_processes_a_strategy_is_and_where(would_run, options, strategy, expected):
    """-np counts what trains; the coordinator and the servers come first, on the first host, and need no slots."""
    assert numbers(would_run(f"--dry-run {options}", f"strategy={strategy}")) == expected


def test_a_command_of_ones_own_with_servers(would_run):
    assert numbers(would_run("--dry-run -np 2 -H s1,s2 --num-ps 1", "python", "x.py")) == (
        "4",
        "s1:3,s2:1",
        [],
    )


@pytest.mark.parametrize("mpirun", [False, True])
def test_each_launcher_has_a_slot_for_each_process(mpirun):
    job = Job(("python", "x.py"), 4, parse_hosts("s1:2,s2:2"), num_ps=1, mpirun=mpirun)
    assert place_ranks(job) == ("s1",) * 4 + ("s2",) * 2
    line = launcher_command(job)
    assert (line[line.index("-np") + 1], line[line.index("-H") + 1]) == ("6", "s1:4,s2:2")
    if mpirun:
        assert line[line.index("--bind-to") + 1] == "none", (
            "no process is bound to a core that another one needs"
        )


def test_a_restart_has_as_many_processes():
    """On the hosts that are left; the first of them then has the coordinator and the servers."""
    job = Job(("python", "x.py"), 2, parse_hosts("s1:2,s2:2"), num_ps=1)
    hosts, num_ranks = choose_hosts(job.hosts, job.num_ranks, job.num_ranks, {}, {"s1"})
    assert hosts_option(hosts) == "s2:2"
    assert place_ranks(Job(job.command, num_ranks, hosts, num_ps=1)) == ("s2",) * 4
    assert choose_hosts(parse_hosts("s1:1,s2:1"), 2, 2, {}, {"s1"}) is None, "no slot for a worker"


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ("--num-ps 1", ["strategy=horovod"], "strategy.num_ps is a setting of strategy=parameter_server"),
        ("-np 2 --min-np 1", ["strategy=servers"], "--min-np cannot be combined with a strategy that needs"),
        ("-np 4 --min-np 1 --max-np 2", ["strategy=elastic"], "--max-np 2 is less than -np 4; raise it"),
        ("-np 2 --max-np 4", ["strategy=replicas"], "--max-np cannot be combined with a strategy that trains"),
        ("-np 2 --host-discovery-script x", ["strategy=servers"], "--host-discovery-script cannot be combined"),
        ("-np 4 -H s1:2,s2:2", ["strategy=replicas"], "-np 4 needs as many slots on one host and s1 has 2; lower -np"),
        ("-np 5 -H s1:2,s2:2", ["strategy=servers"], "-np 5 needs as many slots and -H s1:2,s2:2 has 4"),
        ("-np 2 cluster=mpijob", ["strategy=servers"], "cluster=mpijob starts equal ranks, and this strategy needs a"),
        ("-np 2 cluster=docker", ["strategy=replicas"], "cluster=docker starts equal ranks, .* use cluster=slurm \\("),
        ("-np 2 cluster=spark", ["strategy=replicas"], "cluster=spark starts equal ranks, and this strategy trains"),
        ("-np 2 cluster=slurm --num-ps 1", ["python", "x.py"], "cluster=slurm takes --num-ps only with settings of a"),
        ("", ["strategy=servers", "strategy.num_ps=0"], "strategy.num_ps=0 is out of range; it must be a whole number"),
        ("--task-index 0", ["strategy=horovod"], "start one process together; give --job-name and --coordinator too"),
        ("-np 2 cluster=slurm --start-timeout 5", [], "--start-timeout cannot be combined with cluster=slurm"),
        ("-np 3 -H s1:1,s2:1", [], "-np 3 needs as many slots and -H s1:1,s2:1 has 2; lower -np or add hosts"),
        ("-np 2 -H s1,s2x:", [], "-H s1,s2x:: 's2x:' is not a host and a number of ranks; write -H s1:4,s2:4"),
        ("-H s1 --env NONE", [], "--env NONE: no such variable is set here; set it, or write --env NONE=VALUE"),
        ("-H s1 cluster=slum", [], "cluster=slum is not one of ssh, slurm, mpijob, trainjob, jobset, docker, spark; d"),
        ("--port 2", [], "unrecognized arguments: --port"),
        ("-np 0 -H s1", [], "argument -np: 0 is not a whole number of at least 1"),
        ("-np 2 cluster=slurm cluster.time=60 -p 22", [], "-p cannot be combined with cluster=slurm"),
        ("-np 2 -H s1,s2 --mpi --min-np 1", [], "an elastic job needs Gloo, and --mpi was given"),
        ("-np 2 -H s1,s2", ["train.epoch=3"], r"unknown setting 'train.epoch'; did you mean 'train.epochs'\?"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_one_line(would_run, options, arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        would_run(options, *arguments)
    assert "\n" not in str(error.value)


def test_a_line_without_the_settings_of_a_run_says_where_they_go(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch", "-np", "2"])
    with pytest.raises(
        ConfigError,
        match=r"^the settings of the run are missing; write them after --, for example: -- m",
    ):
        main()


def test_slurms_file_asks_for_those_that_train_and_starts_this_launcher(would_run):
    text = would_run(
        "--dry-run -np 4 cluster=slurm cluster.time=1:00:00 --num-ps 2", "strategy=servers"
    )
    assert "#SBATCH --ntasks=4\n" in text and " strategy.num_ps=2 " in text
    text = would_run("--dry-run -np 4 cluster=slurm cluster.time=1:00:00", "strategy=replicas")
    assert "#SBATCH --ntasks=4\n" in text and "num_replicas" not in text


def test_files_of_jobset_and_spark_start_the_servers_too(would_run):
    text = would_run(
        "--dry-run -np 4 cluster=jobset cluster.image=i --num-ps 2", "strategy=servers"
    )
    assert re.findall("- name: (coordinator|ps|worker)\n      replicas", text) == [
        "coordinator",
        "ps",
        "worker",
    ]
    text = would_run("--dry-run -np 4 cluster=spark --num-ps 2", "strategy=servers")
    assert (
        " --np 7 " in text
        and "spark.executor.instances=7 " in text
        and " strategy.num_ps=2" in text
    )


def test_an_elastic_job_begins_with_its_fewest_ranks(would_run):
    text = would_run("--dry-run --min-np 2 cluster=mpijob cluster.image=i", "strategy=elastic")
    values = re.findall(r'- (--?[a-z]*-?np)\n +- "(\d+)"', text)
    assert values == [("-np", "2"), ("--min-np", "2"), ("--max-np", "2")]


def test_ranks_by_job_and_index():
    roles = roles_of({"num_ps": 2}, 2)
    assert [
        roles.rank_of(*name) for name in (("chief", 0), ("ps", 1), ("worker", 0), ("worker", 1))
    ] == [0, 2, 3, 4]
    assert roles.rank_of("coordinator", 0) == 0
    assert roles_of({}, 3).rank_of("worker", 2) == 2
    with pytest.raises(
        ConfigError,
        match="--task-index 2 is out of range: ps has indices 0 to 1; --num-ps sets the number",
    ):
        roles.rank_of("ps", 2)
    with pytest.raises(
        ConfigError,
        match="--task-index 1 is out of range: coordinator has only index 0; a run has one",
    ):
        roles.rank_of("chief", 1)
    with pytest.raises(
        ConfigError, match="evaluator is not a job of this run; choose from coordinator, ps, "
    ):
        roles.rank_of("evaluator", 0)
    with pytest.raises(
        ConfigError, match=r"--job-name ps is not a job of this run; choose from worker$"
    ):
        roles_of({}, 2).rank_of("ps", 0)


def test_a_failure_names_the_role():
    verdicts = {1: Verdict(1, "out of room")}
    label = Roles(2, 1).label
    assert judge(End("1", 2), verdicts, ["s1", "s1", "s1", "s2"], label=label).message == (
        "FIRST FAILURE ps 0 (rank 1) host s1: out of room"
    )
    assert (
        "FIRST FAILURE rank 1 host s2"
        in judge(End("1", 2), verdicts, ["s1", "s2"], label=Roles(2).label).message
    )


@needs_lab
@pytest.mark.distributed
@pytest.mark.parametrize(
    "how",
    [
        "--gloo",
        *(pytest.param(f"--{name}", marks=pytest.mark.release) for name in ("mpi", "mpirun")),
    ],
)
def test_over_two_hosts(tmp_path, how):
    """Two workers, a server and a coordinator; then a worker fails, all end, and the last line has its role."""
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "say.py").write_text(SAY)
    with Lab(2) as lab:
        program = ["python", str(tmp_path / "say.py"), str(there)]
        arguments = [how, "-np", "2", "-H", "s1:1,s2:1", "--num-ps", "1", "--", *program]
        code, output = lab.launch(*arguments)
    assert [(there / str(rank)).read_text() for rank in range(4)] == ["s1", "s1", "s1", "s2"], (
        output
    )
    assert code == 3 and re.search(
        r"FIRST FAILURE worker 1 \(rank 3\) host s2: ended with exit code 3", output
    ), output


DIES_ONCE = """
import os, pathlib, signal, sys
rank, folder = os.environ["HOROVOD_RANK"], pathlib.Path(sys.argv[1])
again = (folder / rank).exists()
with (folder / rank).open("a") as file:
    file.write(os.environ["HOROVOD_SIZE"])
while not again and sum(1 for _ in folder.iterdir()) < 3:
    pass
if rank == "2" and not again:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.distributed
@pytest.mark.release
def test_a_lost_worker_is_named_and_all_start_again(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "dies.py").write_text(DIES_ONCE)
    arguments = [
        "--gloo",
        "-np",
        "1",
        "--num-ps",
        "1",
        "--max-restarts",
        "1",
        "--",
        "python",
        "dies.py",
        str(there),
    ]
    code, output = launching.run(
        None, 1, "python", "-m", "hvtrain", "launch", *arguments, cwd=tmp_path
    )
    assert code == 0, output
    assert "FIRST FAILURE worker 0 (rank 2) host localhost: killed by SIGKILL" in output
    assert [(there / rank).read_text() for rank in "012"] == ["33", "33", "33"]
