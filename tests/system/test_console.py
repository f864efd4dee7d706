"""What a process knows of the launcher that may have started it."""

import pytest

from hvtrain.system import console


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"SLURM_PROCID": "0"}, False),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0"}, True),
    ],
    ids=["alone", "Slurm's batch script", "srun", "mpirun"],
)
def test_a_process_knows_whether_it_is_one_of_a_launchers(monkeypatch, variables, expected):
    """A batch script of Slurm has a rank too, and its commands are no ranks: export and generate refused them."""
    for name in (*console._RANK_VARIABLES, "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert console.is_launched() == expected
