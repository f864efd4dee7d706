"""The parameter server of TensorFlow 1 with two workers: it trains, and all processes end by themselves."""

import socket

import pytest

from launching import ROOT, finish, start

SCRIPT = str(ROOT / "examples/tf1_parameter_server.py")


def free_ports(number):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(number)]
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize("mode", [(), ("--asynchronous",)], ids=["synchronous", "asynchronous"])
def test_a_server_and_two_workers_train_and_end(tmp_path, mode):
    server, *workers = [f"localhost:{port}" for port in free_ports(3)]
    places = [
        "--ps-hosts",
        server,
        "--worker-hosts",
        ",".join(workers),
        "--folder",
        str(tmp_path / "folder"),
    ]
    roles = [("ps", 0), ("worker", 0), ("worker", 1)]
    processes = [
        start(
            None,
            1,
            "python",
            SCRIPT,
            "--job-name",
            job,
            "--task-index",
            str(index),
            *places,
            *mode,
            cwd=tmp_path,
        )
        for job, index in roles
    ]
    outputs = [finish(process, timeout=560) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    (line,) = [line for line in outputs[1].splitlines() if line.startswith("test accuracy")]
    assert float(line.split()[-1]) > 0.9
    assert list((tmp_path / "folder").glob("model.ckpt-*.index"))
