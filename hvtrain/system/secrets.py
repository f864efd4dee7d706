"""Recognizes secrets: by their names, by their form, and in addresses such as postgres://me:secret@host/.

Notification addresses, which are those in notify= and HVTRAIN_NOTIFY, are secrets as a whole. Pure.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

NOTIFY_VARIABLE = "HVTRAIN_NOTIFY"
# Hydra adds a setting with + and overrides it with ++.
_NOTIFY_ARGUMENT = re.compile(r"\+{0,2}notify=(.*)", re.DOTALL)
# An address may contain commas (to=a,b), so only commas before a scheme are separators.
_ADDRESS_SEPARATOR = re.compile(r"[\s,]+(?=['\"]?[A-Za-z][\w.+-]*://)")
_SCHEME = re.compile(r"[A-Za-z][\w.+-]{0,30}(?=://)")

SECRET = re.compile(
    r"SECRET|TOKEN|PASS|PWD|CREDENTIAL|PRIVATE|NOTIFY|AUTHORIZATION|SIGNATURE|KEY(?!\w)|_KEY_",
    re.IGNORECASE,
)
"""Names whose values may be secrets."""
# Names whose values are secrets whatever their form, even numbers.
_CERTAIN_SECRET = re.compile(
    r"SECRET|PASSW|PASSPHRASE|PWD|CREDENTIAL|NOTIFY|AUTHORIZATION|SIGNATURE|^(KEY|TOKEN|PASS)$"
    r"|(API|ACCESS|ACCOUNT|AUTH|BEARER|CLIENT|PRIVATE|SIGNING|STORAGE|SUBSCRIPTION|SESSION|SAS)[-_.]?(KEY|TOKEN)",
    re.IGNORECASE,
)
# With other names that SECRET matches, such as dataset.target_key or model.mask_token, values of
# this form are shown: plain words, symbols and small numbers are seldom secrets.
_PLAIN = re.compile(
    r"[^\W\d]{1,24}([ _./-][^\W\d]{1,24}){0,5}|[<\[]\w{1,16}[>\]]|\W{0,4}|-?\d{1,6}"
)
WITH_PASSWORD = re.compile(r"://[^/\s:]*:[^/\s]+@|https?://[^/\s?#]+@", re.IGNORECASE)
_SECRET_IN_TEXT = re.compile(
    r"(?P<before>\b(?:Bearer|Basic)\s+)[\w.~+/=-]{6,}"
    r"|(?P<name>[?&](?:sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token)|\w*token|\w*key|\w*secret"
    r"|password|googleaccessid|awsaccesskeyid)=)[^&\s'\"#]+"
    r"|\b(?:gh[pousr]_\w{16,}|github_pat_\w{16,}|hf_\w{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]+\.[\w-]+)",
    re.IGNORECASE,
)
# NAME: VALUE inside a group on a command line, such as +dataset.storage={key:...,url:...}.
_SETTING_IN_GROUP = re.compile(
    r"([\w.]+)(['\"]?\s*:\s*)('[^']*'|\"[^\"]*\"|[\[{][^\[\]{}]*[\]}]|[^,{}\[\]]+)"
)
HIDDEN = "***"


def split_addresses(text: str) -> list[str]:
    """Splits text into addresses, separated by commas or whitespace; drops brackets and quotes.

    >>> split_addresses("[mailto://me:hunter2@host?to=a@b.org,c@d.org, 'json://localhost']")
    ['mailto://me:hunter2@host?to=a@b.org,c@d.org', 'json://localhost']
    >>> split_addresses("[]")
    []
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return [part.strip("'\" \t\r\n,") for part in _ADDRESS_SEPARATOR.split(text) if part.strip()]


def chosen_addresses(setting: str | list[str] | None, environ: Mapping[str, str]) -> list[str]:
    """Returns the addresses in the setting `notify` or, if it is null, in the environment variable.

    >>> environ = {"HVTRAIN_NOTIFY": "json://here json://there"}
    >>> chosen_addresses(None, environ), chosen_addresses([], environ)
    (['json://here', 'json://there'], [])
    """
    # An empty list turns notifications off, whatever the variable says.
    if isinstance(setting, list):
        return setting
    if setting is None:
        setting = environ.get(NOTIFY_VARIABLE, "")
    return split_addresses(setting)


def take_addresses(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Removes notify=... from a command line.

    Returns the other arguments, and the value of the last notify=; None if there is none.

    >>> take_addresses(["model=mlp", "notify=json://localhost?a=b"])
    (['model=mlp'], 'json://localhost?a=b')
    """
    others = []
    value = None
    for argument in arguments:
        match = _NOTIFY_ARGUMENT.fullmatch(argument)
        if match:
            value = match[1]
        else:
            others.append(argument)
    return others, value


def shown_address(address: str) -> str:
    """Returns an address without its secrets.

    >>> shown_address("slack://TokenA/TokenB/TokenC"), shown_address("hunter2")
    ('slack://***', '***')
    """
    scheme = _SCHEME.match(address)
    return f"{scheme[0]}://{HIDDEN}" if scheme else HIDDEN


def without_passwords(text: str) -> str:
    """Replaces passwords, tokens and signatures in text, such as an error message, with ***.

    >>> without_passwords("no answer from https://me:hunter2@host/runs")
    'no answer from https://***@host/runs'
    >>> without_passwords("GET https://host/a.csv?sv=2&sig=aGVsbG8%3D failed for Bearer abc.def-123")
    'GET https://host/a.csv?sv=2&sig=*** failed for Bearer ***'
    """
    text = WITH_PASSWORD.sub(lambda match: f"{match[0].partition('://')[0]}://{HIDDEN}@", text)
    return _SECRET_IN_TEXT.sub(
        lambda match: f"{match['before'] or match['name'] or ''}{HIDDEN}", text
    )


def redacted(value: Any, name: str = "") -> Any:
    """Returns a copy of a setting, or of a tree of settings, with each secret replaced by ***.

    >>> redacted({"api_key": 12345678, "image_key": "image", "backward_passes": 2, "url": "https://me:hunter2@host/"})
    {'api_key': '***', 'image_key': 'image', 'backward_passes': 2, 'url': 'https://***@host/'}
    >>> redacted({"header": "Bearer abc.def-123", "mask_token": "<mask>", "my_key": "q7Xw93jf", "token": "any"})
    {'header': 'Bearer ***', 'mask_token': '<mask>', 'my_key': '***', 'token': '***'}
    """
    # For _CERTAIN_SECRET only the last part of a dotted name counts, not the groups before it.
    is_certain = bool(_CERTAIN_SECRET.search(name.rpartition(".")[2]))
    if isinstance(value, dict):
        # Everything in a group of secrets is secret, whatever its name.
        return {
            key: redacted(item, name if is_certain else str(key)) for key, item in value.items()
        }
    if isinstance(value, list):
        return [redacted(item, name) for item in value]
    # These values are never secrets, and records should show that the setting is empty or a switch.
    if value is None or isinstance(value, bool) or value == "":
        return value
    if is_certain:
        return HIDDEN
    if not isinstance(value, str):
        return value
    if SECRET.search(name) and not _PLAIN.fullmatch(value):
        return HIDDEN
    return without_passwords(value)


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Returns a command's arguments for a record: secrets hidden, notification addresses removed.

    >>> without_secrets(["model=cnn", "dataset.api_key=hunter2", "notify=mailto://me:hunter2@host", "-cd"])
    ['model=cnn', 'dataset.api_key=***', '-cd']
    >>> without_secrets(["+dataset.storage={key: hunter2, bucket: images, api_keys: [hunter2, swordfish]}"])
    ['+dataset.storage={key: ***, bucket: images, api_keys: ***}']
    >>> without_secrets(["--env=MY_KEY=hunter2", "--env", "TOKEN=hunter2", "--env=TF_LOG=1"])
    ['--env=MY_KEY=***', '--env', 'TOKEN=***', '--env=TF_LOG=1']
    >>> without_secrets(["+dataset.storage={read: {key: hunter2, depth: 2}, secrets: {first: hunter2}}"])
    ['+dataset.storage={read: {key: ***, depth: 2}, secrets: ***}']
    """
    shown = []
    for argument in take_addresses(arguments)[0]:
        # In --env=NAME=VALUE the variable's name decides, not the option's.
        option = "--env=" if argument.startswith("--env=") else ""
        name, equals, value = argument.removeprefix(option).partition("=")
        value = _without_secrets_in_groups(redacted(value, name))
        # The equals sign may be inside an address, which has then been split in two.
        shown.append(without_passwords(f"{option}{name}{equals}{value}"))
    return shown


def command_line(command: str, arguments: Sequence[str]) -> str:
    """Returns the line `python -m hvtrain COMMAND ...` for a record, without secrets.

    >>> command_line("sweep", ["sweep=optimizer", "dataset.api_key=hunter2"])
    "python -m hvtrain sweep sweep=optimizer 'dataset.api_key=***'"
    """
    return shlex.join(["python", "-m", "hvtrain", command, *without_secrets(arguments)])


def _without_secrets_in_groups(value: str) -> str:
    if "{" not in value:
        return value

    def shown(match: re.Match[str]) -> str:
        name, colon, item = match.groups()
        return f"{name}{colon}{_without_secrets_in_groups(redacted(item, name))}"  # Groups may be nested.

    return _SETTING_IN_GROUP.sub(shown, value)
