"""Google Cloud Storage and Azure Blob Storage, against emulators with their interfaces."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
from pyarrow import fs
from test_store_data import batches_of, image_folder, parquet
from test_store_runs import CHECKPOINT, elsewhere, names, write

from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.errors import ConfigError, DataError, StorageError
from hvtrain.system.storage import cache, remote
from hvtrain.system.storage.runs import open_store
from object_store import PACKAGES
from receivers import free_port
from tiers import mostly_nightly

ACCOUNT = "account"
KEY = base64.b64encode(b"of the tests").decode()


@contextmanager
def emulator(port: int, command: list[str], **options):
    """A server that listens at the port."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    ) as server:
        try:
            for _ in range(600):
                assert server.poll() is None, "the server has ended"
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield
        finally:
            server.kill()


@pytest.fixture(scope="module")
def google():
    if not PACKAGES.is_dir():
        pytest.skip("gcp-storage-emulator (scripts/lock/object-store.txt) is missing")
    port = free_port()
    words = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=unit"]
    command = [sys.executable, "-m", "gcp_storage_emulator", *words]
    with emulator(port, command, env={**os.environ, "PYTHONPATH": str(PACKAGES)}):
        yield "gs://unit", {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}


@pytest.fixture(scope="module")
def azure(tmp_path_factory):
    if not shutil.which("npm"):
        pytest.skip("npm, which installs Azurite, is missing")
    folder = tmp_path_factory.mktemp("azurite")
    subprocess.run(["npm", "install", "--silent", "azurite@3"], cwd=folder, check=True)
    port = free_port()
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", f"--blobPort={port}"]
    accounts = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    with emulator(port, ["node_modules/.bin/azurite-blob", *options], cwd=folder, env=accounts):
        place = f"127.0.0.1:{port}"
        fs.AzureFileSystem(
            ACCOUNT, account_key=KEY, blob_storage_authority=place, blob_storage_scheme="http"
        ).create_dir("unit")
        yield (
            f"abfs://unit@{ACCOUNT}.dfs.core.windows.net",
            {"AZURE_STORAGE_SERVICE_ENDPOINT": f"http://{place}", "AZURE_STORAGE_KEY": KEY},
        )


@pytest.fixture(params=["google", pytest.param("azure", marks=pytest.mark.release)])
def root(request, monkeypatch, tmp_path):
    """The address of an empty bucket or container."""
    address, environment = request.getfixturevalue(request.param)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HVTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "SECONDS_BEFORE_RETRIES", ())
    remote._filesystem.cache_clear()
    cache.forget_copies()
    yield address
    cache._locks.clear()


@pytest.mark.parametrize("make", mostly_nightly([image_folder, parquet], image_folder))
def test_data_are_those_of_a_local_folder(make, root, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    open_source = make(folder)
    far = remote.locate(f"{root}/{make.__name__}")
    for file in folder.rglob("*"):
        if file.is_file():
            far.child(file.relative_to(folder).as_posix()).upload(file)
    expected = batches_of(open_source(str(folder)))
    assert all(map(np.array_equal, expected, batches_of(open_source(far.address))))


def test_a_run_goes_on_from_another_host(root, monkeypatch, tmp_path):
    run = open_store(f"{root}/runs/first")
    run.folder.mkdir(parents=True)
    run.begin()
    for step in (1, 2, 3):
        write(run.folder, step)
        run.send()
    other = elsewhere(run.address, monkeypatch, tmp_path / "other")
    other.begin()
    assert names(other.folder) == names(run.folder)
    assert CHECKPOINT.format(step=3) in names(other.folder)
    assert CHECKPOINT.format(step=1) not in names(other.folder)
    with pytest.raises(StorageError, match="was taken over by a later start"):
        write(run.folder, 4)
        run.send()


def test_what_is_not_there_is_named(root, tmp_path):
    with pytest.raises(DataError, match=f"{root}/none .*(is empty|does not exist|holds no)"):
        ImageFolder(f"{root}/none", (8, 8, 3)).num_examples("train")
    with pytest.raises(DataError, match=f"^{root}/none does not exist; check the bucket"):
        remote.locate(f"{root}/none").read_json()


def test_a_host_without_credentials_is_told_so(monkeypatch):
    """Google's client alone would retry for 15 minutes, and Azure's would abort the process."""
    for name in [*os.environ]:
        if name.startswith(("AZURE_", "GOOGLE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(remote, "GOOGLE_RETRY_SECONDS", 1)
    remote._filesystem.cache_clear()
    with pytest.raises(DataError, match=r"^gs://unit/a cannot be accessed \(.*OAuth2 access token"):
        remote.locate("gs://unit/a").objects()
    with pytest.raises(ConfigError, match="this host has no Azure credentials; set AZURE_STOR"):
        remote.locate("abfs://unit@me.dfs.core.windows.net/a")
    with pytest.raises(ConfigError, match=r"^abfs://unit names no account; use abfs://CONTAINER@"):
        remote.locate("abfs://unit/a")
