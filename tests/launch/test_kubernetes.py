"""MPIJob, TrainJob, JobSet: files hold to the operators' schemas and to Kubernetes' own, and say what was asked."""

import copy
import re
import shlex
import socket
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from hvtrain.config.validate import typed
from hvtrain.errors import ConfigError
from hvtrain.launch.cluster_files import submission, texts
from hvtrain.launch.job import Job, parse_hosts
from hvtrain.launch.kubernetes import JobSet, MpiJob, TrainJob

SCHEMA = yaml.safe_load((Path(__file__).parent / "mpijob.schema.yaml").read_text())
WORDS = ("python", "-m", "hvtrain", "callbacks=[a,b]", '+x=it\'s $(HOME) $HOME $$ "q"', "a: b #c")
JOB = Job(WORDS, 8, environment={"TF_FLAGS": "a 'b' $(TF_FLAGS) $c \"d\": {e}\nf"})
OF_PODS = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "imagePullSecrets": [{"name": "registry"}],
}
FULL = MpiJob(
    image="registry.example/hvtrain:1",
    ranks_per_worker=2,
    data_claim="data",
    runs_claim="runs",
    namespace="team",
    queue="team-queue",
    pod=OF_PODS,
)
KINDS = {"mpijob": MpiJob, "trainjob": TrainJob}
# Each process of a JobSet is a pod.
SERVERS = Job(WORDS, 3, num_ps=2, environment=JOB.environment)


def documents(kind, job=JOB, settings=FULL):
    if kind == "jobset":
        values = {
            name: value for name, value in vars(settings).items() if name != "ranks_per_worker"
        }
        cluster = JobSet(**values)
    else:
        cluster = KINDS[kind](**vars(settings))
    (text,) = texts(cluster, job).values()
    return list(yaml.safe_load_all(text))


def pods(kind, job=JOB, settings=FULL):
    """The pods of launcher and worker, or of a JobSet's jobs."""
    tree = documents(kind, job, settings)[0]["spec"]
    if kind == "jobset":
        return [entry["template"]["spec"]["template"]["spec"] for entry in tree["replicatedJobs"]]
    if kind == "mpijob":
        roles = tree["mpiReplicaSpecs"]
        return [roles[role]["template"]["spec"] for role in ("Launcher", "Worker")]
    jobs = {
        entry["name"]: entry["template"]["spec"]
        for entry in tree["template"]["spec"]["replicatedJobs"]
    }
    return [jobs[role]["template"]["spec"] for role in ("launcher", "node")]


def as_kubernetes_reads(text):
    """What a container gets for a word of args, by Kubernetes' rule: $$ is a dollar, $(NAME) is replaced."""
    return re.sub(r"\$\$|\$\(\w+\)", lambda match: "$" if match[0] == "$$" else "REPLACED", text)


def check_mpijob(tree):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(tree, SCHEMA)


ELASTIC = Job(WORDS, 4, min_ranks=2, max_ranks=8)
MPI = Job(WORDS, 8, controller="mpi")
CPU = MpiJob(image="hvtrain:cpu", gpus_per_rank=0)


@pytest.mark.parametrize("settings", [FULL, CPU], ids=["full", "cpu"])
@pytest.mark.parametrize("job", [JOB, ELASTIC, MPI], ids=["gloo", "elastic", "mpi"])
def test_the_operator_knows_every_field_of_the_mpijob(job, settings):
    (tree,) = documents("mpijob", job, settings)
    check_mpijob(tree)


def edited(path, value):
    (tree,) = copy.deepcopy(documents("mpijob"))
    *way, last = path.split("/")
    node = tree
    for key in way:
        node = node[key]
    node[last] = value
    return tree


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/slotPerWorker", 2),
        ("spec/cleanPodPolicy", "Running"),
        ("spec/runPolicy/backofflimit", 3),
        ("spec/runPolicy/cleanPodPolicy", "running"),
        ("spec/mpiImplementation", "openmpi"),
        ("spec/mpiReplicaSpecs/Launcher/replicas", 2),
        ("spec/mpiReplicaSpecs/Worker/restartPolicy", "Always"),
        ("spec/mpiReplicaSpecs/worker", {}),
        ("spec/mpiReplicaSpecs/Worker/template/spec/restartPolicy", "Never"),
        ("apiVersion", "kubeflow.org/v1"),
    ],
)
def test_the_schema_refuses_what_the_operator_would_drop_or_refuse(path, value):
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        check_mpijob(edited(path, value))


@pytest.mark.parametrize("settings", [FULL, CPU], ids=["full", "cpu"])
def test_trainer_knows_every_field_of_runtime_and_trainjob(settings):
    """The models drop what they do not know, so a field that is lost on the way through was misspelt."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    runtime, train_job = documents("trainjob", JOB, settings)
    assert (
        models.TrainerV1alpha1TrainingRuntime.from_dict(copy.deepcopy(runtime)).to_dict() == runtime
    )
    assert models.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(train_job)).to_dict() == train_job
    wrong = copy.deepcopy(runtime)
    wrong["spec"]["mlPolicy"]["mpi"]["numProcsPerNode"] = 2
    assert models.TrainerV1alpha1TrainingRuntime.from_dict(copy.deepcopy(wrong)).to_dict() != wrong


@pytest.mark.parametrize("settings", [FULL, CPU], ids=["full", "cpu"])
def test_jobset_knows_every_field_of_the_jobset(settings):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (tree,) = documents("jobset", SERVERS, settings)
    assert models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(tree)).to_dict() == tree
    wrong = copy.deepcopy(tree)
    wrong["spec"]["failurePolicy"]["maxRestart"] = 2
    assert models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(wrong)).to_dict() != wrong


@pytest.mark.parametrize("settings", [FULL, CPU], ids=["full", "cpu"])
@pytest.mark.parametrize("kind", [*KINDS, "jobset"])
def test_kubernetes_takes_the_pods(kind, settings):
    validate = pytest.importorskip("kubernetes_validate")
    for pod in pods(kind, SERVERS if kind == "jobset" else JOB, settings):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
        validate.validate(whole, validate.latest_version(), strict=True)
        with pytest.raises(validate.ValidationError):
            validate.validate(
                {**whole, "spec": {**pod, "restartpolicy": "Never"}},
                validate.latest_version(),
                strict=True,
            )


@pytest.mark.parametrize("kind", KINDS)
def test_words_and_variables_arrive_as_they_were(kind):
    launcher, worker = (pod["containers"][0] for pod in pods(kind))
    line = [as_kubernetes_reads(argument) for argument in launcher["args"]]
    assert line[:6] == ["horovodrun", "--gloo", "--ssh-port", "2222", "-np", "8"]
    assert tuple(line[line.index("python") :]) == WORDS
    assert {item["name"]: as_kubernetes_reads(item["value"]) for item in launcher["env"]} == {
        "TF_FLAGS": JOB.environment["TF_FLAGS"]
    }
    assert worker["args"] == ["worker", "2222"]
    # SIGUSR1 has no time limit but that of the pod.
    assert launcher["lifecycle"]["preStop"]["exec"]["command"][2].startswith(
        "kill -USR1 1 && while"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_workers_get_their_ranks_gpus_memory_and_volumes(kind):
    launcher, worker = pods(kind)
    container = worker["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "2"}
    assert "nvidia.com/gpu" not in launcher["containers"][0]["resources"]["limits"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {"data": "/data", "runs": "/home/hvtrain/runs"}
    assert mounts == {
        "scratch": "/tmp",
        "home": "/home/hvtrain",
        "shared-memory": "/dev/shm",
        **claims,
    }
    assert {volume["name"] for volume in worker["volumes"]} == set(mounts)
    assert all(pod["securityContext"]["runAsUser"] == 10001 for pod in (launcher, worker))
    first, *_ = documents(kind)
    count = first["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] if kind == "mpijob" else None
    assert (count or first["spec"]["mlPolicy"]["numNodes"]) == 4


@pytest.mark.parametrize("kind", [*KINDS, "jobset"])
def test_a_site_says_where_pods_run_what_they_pull_and_who_admits_them(kind):
    trees = documents(kind)
    assert trees[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    for pod in pods(kind):
        assert {name: pod[name] for name in OF_PODS} == OF_PODS
        assert pod["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize("job", [SERVERS, Job(WORDS, 3)], ids=["servers", "ranks"])
def test_each_process_of_a_jobset_is_named_by_role_and_index(job):
    """That they find each other and train is in strategies/test_parameter_servers.py."""
    (tree,) = documents("jobset", job)
    jobs = {entry["name"]: entry["template"]["spec"] for entry in tree["spec"]["replicatedJobs"]}
    assert {role: entry["completions"] for role, entry in jobs.items()} == job.roles.counts
    first = next(iter(jobs))
    for role, entry in jobs.items():
        assert (entry["completionMode"], entry["parallelism"]) == ("Indexed", entry["completions"])
        (container,) = entry["template"]["spec"]["containers"]
        line = [as_kubernetes_reads(argument) for argument in container["args"]]
        assert line[3] == f"hvtrain-{first}-0-0.hvtrain"
        assert line[line.index("--coordinator") + 1] == f"{line[3]}:2222"
        assert (line[line.index("--job-name") + 1], line[line.index("--task-index") + 1]) == (
            role,
            "REPLACED",
        )
        assert tuple(line[line.index("python") :]) == WORDS
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (role == "worker")


@pytest.mark.parametrize("kind", [*KINDS, "jobset"])
def test_pods_write_to_volumes_alone_and_gain_no_rights(kind):
    """That a worker trains so is in test_kubernetes_root.py."""
    for pod in pods(kind):
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        empty = {volume["name"] for volume in pod["volumes"] if volume.get("emptyDir") == {}}
        assert {mounts["/tmp"], mounts["/home/hvtrain"]} == empty


def test_trainer_finds_the_pods_by_name():
    """Trainer gives keys and the list of hosts to containers "node" of the replicated jobs "launcher" and "node"."""
    runtime, train_job = documents("trainjob")
    jobs = {entry["name"]: entry for entry in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    assert set(jobs) == {"launcher", "node"}
    assert [pod["containers"][0]["name"] for pod in pods("trainjob")] == ["node", "node"]
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train_job["metadata"]["namespace"] == runtime["metadata"]["namespace"] == "team"
    assert train_job["spec"]["trainer"] == {"numNodes": 4, "numProcPerNode": 2}


def test_an_elastic_job_may_start_small_and_grow():
    (tree,) = documents("mpijob", ELASTIC)
    line = pods("mpijob", ELASTIC)[0]["containers"][0]["args"]
    assert tree["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 4
    assert tree["spec"]["launcherCreationPolicy"] == "AtStartup"
    for option, value in (("-np", "4"), ("--min-np", "2"), ("--max-np", "8")):
        assert line[line.index(option) + 1] == value
    assert "--hostfile" not in line


def test_the_discovery_names_only_hosts_that_answer(tmp_path):
    """The line runs as the launcher runs it, by sh, with the operator's script in a folder of the test's own."""
    script = tmp_path / "discover_hosts.sh"
    script.write_text(
        f"#!/bin/sh\necho 127.0.0.1\necho no-such-host.invalid\necho 'x; touch {tmp_path}/run;'\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        arguments = pods("mpijob", ELASTIC)[0]["containers"][0]["args"]
        line = as_kubernetes_reads(arguments[arguments.index("--host-discovery-script") + 1])
        assert "\n" not in line, "Horovod splits its options there"
        line = line.replace("/etc/mpi/discover_hosts.sh", shlex.quote(str(script))).replace(
            "2222", str(port)
        )
        open_port = subprocess.run(
            ["/bin/sh", "-c", line], capture_output=True, text=True, check=True
        ).stdout
    closed_port = subprocess.run(
        ["/bin/sh", "-c", line], capture_output=True, text=True, check=True
    ).stdout
    assert (open_port, closed_port) == ("127.0.0.1:2\n", "")
    assert not (tmp_path / "run").exists(), "a host's name is not run"


@pytest.mark.parametrize("kind", KINDS)
def test_kubectl_gets_the_file(kind):
    cluster = KINDS[kind](**vars(FULL))
    (name,) = texts(cluster, JOB)
    assert submission(cluster, Path("a b")) == ["kubectl", "create", "-f", f"a b/{name}"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("job", "settings", "message"),
    [
        (JOB, {}, r"is not set; .*cluster\.image="),
        (JOB, {"image": "i", "ranks_per_worker": 3}, r"8 ranks do not divide .*=3"),
        (Job(WORDS, 2, parse_hosts("s1,s2")), {"image": "i"}, "does not take -H"),
        (JOB, {"image": "i", "name": "My_run"}, "cluster.name=My_run is not a name"),
        (JOB, {"image": "i", "name": "a" * 41}, "up to 40"),
        (
            JOB,
            {"image": "i", "runs_claim": "my claim"},
            "cluster.runs_claim=my claim is not a name",
        ),
        (JOB, {"image": "i", "memory_per_rank": "lots"}, "not an amount of memory"),
        (JOB, {"image": "i", "data_path": "data"}, "cluster.data_path=data"),
        (JOB, {"image": "i", "queue": "my queue"}, "cluster.queue=my queue is not a name"),
        (
            JOB,
            {"image": "i", "pod": {"nodeselector": {}}},
            "'cluster.pod.nodeselector'; did you mean 'nodeSelector'?",
        ),
        (
            JOB,
            {"image": "i", "pod": {"volumes": []}},
            "unknown setting 'cluster.pod.volumes'; known: affinity",
        ),
    ],
)
def test_what_cannot_start_is_refused_in_one_line(kind, job, settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        texts(typed(KINDS[kind], settings, "cluster."), job)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "name"), [("trainjob", "TrainJob"), ("jobset", "JobSet")])
def test_an_elastic_job_of_fixed_size_is_refused(kind, name):
    with pytest.raises(ConfigError, match=f"a {name} keeps its size"):
        documents(kind, ELASTIC)
