"""The Dockerfile, read: no engine is needed."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text()


def stages():
    """Each stage's name, base and instructions, in order."""
    found = {}
    lines = re.sub(r"\\\n\s*", " ", "\n".join(x for x in TEXT.splitlines() if not x.startswith("#"))).splitlines()
    for line in filter(None, lines):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = {"base": base, "instructions": []}
        else:
            next(reversed(found.values()))["instructions"].append((word, rest))
    return found


def test_hadolint_is_content():
    done = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_gpu_is_the_default_target_and_cpu_is_there():
    assert list(stages())[-1] == "gpu"
    assert {"gpu", "cpu"} <= set(stages())


def test_images_run_as_an_ordinary_user_through_the_entry_point():
    for name in ("cpu", "gpu"):
        instructions = stages()[name]["instructions"]
        users = [rest for word, rest in instructions if word == "USER"]
        assert users and users[-1] not in ("root", "0")
        assert ("ENTRYPOINT", '["/opt/hvtrain/scripts/docker-entrypoint"]') in instructions


def test_compilers_stay_in_the_build_stages():
    for name in ("cpu", "gpu"):
        stage = stages()[name]
        base = stages().get(stage["base"], {"base": stage["base"], "instructions": []})
        text = " ".join(rest for word, rest in base["instructions"] + stage["instructions"] if word == "RUN")
        assert "g++" not in text
        assert "devel" not in base["base"]


def test_the_build_makes_the_environment_which_proves_itself():
    for name in ("build-cpu", "build-gpu"):
        runs = [rest for word, rest in stages()[name]["instructions"] if word == "RUN"]
        assert any("./scripts/run true" in rest for rest in runs), "its last act is an allreduce of two processes"
    assert "prove-allreduce" in (ROOT / "scripts" / "make-environment").read_text()


def test_no_key_is_baked_in():
    copied = [rest for stage in stages().values() for word, rest in stage["instructions"] if word in ("COPY", "ADD")]
    assert not [rest for rest in copied if re.search(r"\.ssh|id_|key|\.pem", rest)]
    assert "ssh-keygen" not in TEXT, "host keys are made when a container starts"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*", "only what is named goes into the image"


def test_host_keys_of_the_package_leave_in_the_layer_that_made_them():
    runs = [rest for stage in stages().values() for word, rest in stage["instructions"] if word == "RUN"]
    installs = [rest for rest in runs if "openssh-server" in rest]
    assert len(installs) == 2, "one in each image"
    for rest in installs:
        assert re.search(r"rm -rf [^&]*/etc/ssh/ssh_host_\*", rest), rest


def test_the_environment_of_each_image_is_the_one_that_was_made():
    for name, variant in (("cpu", None), ("gpu", "gpu")):
        text = " ".join(rest for word, rest in stages()[name]["instructions"] if word == "ENV")
        chosen = re.search(r"HVTRAIN_VARIANT=(\w+)", text)
        assert (chosen and chosen[1]) == variant, "or scripts/run would make another one in the container"
        assert "OPAL_PREFIX=/opt/hvtrain/.venv" in text, "or MPI does not start on a second host"
