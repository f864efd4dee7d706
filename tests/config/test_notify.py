"""notify= with its addresses, as people write them, and where their secrets must not be shown."""

import subprocess
import sys

import pytest

from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.errors import ConfigError
from hvtrain.launch import environment
from hvtrain.training.run_folder import reusable_settings

MAIL = "mailto://me:hunter2@host:25?to=a@b.org,c@d.org&mode=insecure"
SLACK = "slack://hunter2/B1/C1"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], None),
        (["notify=null"], None),
        (["notify=[]"], []),
        ([f"notify={MAIL}"], [MAIL]),
        ([f"+notify=[{MAIL}, {SLACK}]"], [MAIL, SLACK]),
        ([f"notify={MAIL} '{SLACK}'"], [MAIL, SLACK]),
        (["notify=json://first", f"notify={SLACK}"], [SLACK]),
    ],
)
def test_addresses_stand_as_they_are(arguments, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hvtrain"])
    assert from_dict(compose(["model=mlp", *arguments])).notify == expected
    assert sys.argv == ["hvtrain"], "the command line stays as it was"


def test_records_have_no_secret(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hvtrain"])
    config = from_dict(compose([f"notify=[{MAIL},{SLACK}]"]))
    assert config.record["notify"] == ["***", "***"]
    assert reusable_settings(config)["notify"] is None, "so that config.yaml starts another run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [f"notfy={MAIL}"],
            "notfy=... has a character that is special to Hydra; put it in quotes: \"notfy='...'\"",
        ),
        ([f"notfy={SLACK}"], "unknown setting 'notfy'; did you mean 'notify'?"),
        ([f"notify.mail={SLACK}"], "unknown setting 'notify.mail'"),
        ([f"notify={SLACK}", "train.epochs=many"], "train.epochs=many is not a whole number"),
        ([f"notify={SLACK}", "train.epochs=[1"], "has a character that is special to Hydra"),
        (["+dataset.api_key=hunter2=="], "+dataset.api_key=*** has a character that is special"),
        (["+dataset.login={key: hunter2=}"], "+dataset.login={key: ***} has a character that is"),
        (["+dataset.api_key=hunter2,x"], "+dataset.api_key=*** has several values; give one, "),
    ],
)
def test_errors_have_no_secret(arguments, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hvtrain"])
    with pytest.raises(ConfigError) as caught:
        from_dict(compose(arguments))
    assert message in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize("value", [{"mail": SLACK}, [1, SLACK, {"a": SLACK}]])
def test_a_file_with_something_else_is_refused_without_showing_it(value, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hvtrain"])
    tree = compose([])
    with pytest.raises(ConfigError, match=r"^notify=.*\*\*\*.* is not a string") as caught:
        from_dict({**tree, "notify": value})
    assert "hunter2" not in str(caught.value)


def test_the_variable_reaches_ranks_and_is_not_open():
    """Whatever its value looks like."""
    for value in (MAIL, SLACK):
        values = {"PATH": "/bin", "HVTRAIN_NOTIFY": value}
        assert environment.for_ranks(values)["HVTRAIN_NOTIFY"] == value
        assert not environment.is_sendable("HVTRAIN_NOTIFY", values), (
            "hvtrain.checks.info would show it"
        )
        assert "HVTRAIN_NOTIFY" not in environment.parse_env_options(values, []), (
            "a cluster's files would hold it"
        )


def output(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_what_hydra_prints_has_no_secret(tmp_path):
    code, text = output("hvtrain", "--cfg", "job", f"notify={MAIL}", cwd=tmp_path)
    assert code == 0 and "notify: null" in text and "hunter2" not in text


def test_a_launch_has_them_on_no_command_line_and_in_no_file(tmp_path):
    dry = ["hvtrain", "launch", "-np", "2", "--dry-run"]
    code, text = output(*dry, "--", f"notify=[{MAIL},{SLACK}]", "model=mlp", cwd=tmp_path)
    assert code == 0 and "model=mlp" in text and "hunter2" not in text
    code, text = output(
        *dry, "cluster=slurm", "cluster.time=1:00:00", "--", f"notify={SLACK}", cwd=tmp_path
    )
    assert (code, text) == (
        2,
        "hvtrain: cluster=slurm cannot be combined with notify=, whose addresses would be written to its files; "
        "set HVTRAIN_NOTIFY where the job runs instead\n",
    )
    code, text = output(*dry, "--", f"notify={SLACK}", "notify=[]", cwd=tmp_path)
    assert code == 0 and "notify=[]" in text and "hunter2" not in text
