"""The start of an elastic job: its hosts are waited for, with a word, and not for ever."""

import pytest

from launching import run

SCRIPT = "--host-discovery-script ./hosts.sh failed:"
WAITED = "waited 3 s (--elastic-timeout) for 2 slots (-np), and ./hosts.sh lists"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "exit 3",
            f"{SCRIPT} Failed to execute discovery script: ./hosts.sh. Exit code: 3; it must print a line HOST:SLO",
        ),
        ("echo a:b:c", f"{SCRIPT} too many values to unpack (expected 2); it must print a line HOST:SLOTS"),
        ("echo localhost:1", f"{WAITED} localhost:1; make hosts available, or lower -np"),
        ("true", f"{WAITED} no host; make hosts available, or lower -np"),
    ],
)
def test_hosts_that_do_not_come(script, said, tmp_path):
    path = tmp_path / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    words = [
        "horovodrun",
        "--gloo",
        "-np",
        "2",
        "--min-np",
        "1",
        "--elastic-timeout",
        "3",
        "--host-discovery-script",
        "./hosts.sh",
        "true",
    ]
    code, output = run(None, 1, *words, cwd=tmp_path)
    assert code == 2
    *before, last = output.splitlines()
    assert last.startswith(f"horovodrun: {said}")
    waits = "waited" in said
    assert ["hvtrain: waiting for 2 slots (-np), and ./hosts.sh lists" in line for line in before] == [True] * waits
