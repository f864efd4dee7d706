"""The errors that a user can cause. Each message says what is wrong, what is needed and what to do.

Every command prints the message of a UserError as one line, without a traceback. Any other exception
is a defect, in hvtrain or in the user's own code; it is shown in full, and then summed up by `cause_of`.
"""

import re
import sysconfig
import traceback
from pathlib import Path

RESTART_HELPS = 75  # sysexits.h: EX_TEMPFAIL. Every other code says that a restart cannot help.
INTERRUPTED = 130  # The exit code that shells report after Ctrl-C.
THIS_RANK = -1  # A value of `culprit`: the rank that raises the error.
MAX_MESSAGE_LENGTH = 1000
NOT_FINITE_ADVICE = (
    "the last checkpoint predates this step; lower optimizer.learning_rate, clip gradients "
    "(+optimizer.global_clipnorm=1), or inspect the data of this step"
)


class UserError(Exception):
    """An error that a user can fix with its message alone.

    Attributes:
        exit_code: the exit code of a command that fails with this error.
        reporting_rank: the rank that reports the error first if all ranks raise it.
        culprit: the rank at fault, or THIS_RANK; None if it is unknown.
    """

    exit_code = 2
    reporting_rank = 0
    culprit: int | None = THIS_RANK
    # Takes precedence over the __init__ of RuntimeError and the like: TensorFlow
    # preserves the class of an error that is raised in a traced function only if the
    # class has Exception's __init__.
    __init__ = Exception.__init__


class ConfigError(UserError, ValueError):
    """A setting that is unknown, of the wrong type, out of range, or in conflict with another."""


class DataError(UserError, ValueError):
    """A data set that is missing, damaged, or not what the settings say."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written, or that does not fit the model that should resume from it."""


class TrainingError(UserError, ArithmeticError):
    """Training that cannot continue, for example because a loss or gradient is not finite."""


class StorageError(UserError, RuntimeError):
    """Results that cannot be written, or an object store that does not answer."""


class TakenOverError(StorageError):
    """A later start of the run has taken it over, so this one must end, whatever checkpoint.on_error says."""


class RankError(UserError, RuntimeError):
    """Ranks that do not train together: nothing reduced, one GPU shared, settings that differ."""


class LostRankError(UserError, RuntimeError):
    """A rank is gone, makes no progress or computes wrongly.

    Settings are not the cause, so a restart may help.
    """

    exit_code = RESTART_HELPS
    culprit = None


class BusyError(UserError, RuntimeError):
    """Another run is using something that this run needs, and will release it."""

    exit_code = RESTART_HELPS


class FailedRankError(UserError, RuntimeError):
    """Another rank failed and said why; this rank stops because of it."""

    exit_code = 1
    culprit = None


class Stopped(SystemExit):
    """Ends a run that a signal asked to stop. The run is saved, and can be resumed.

    The exit code is INTERRUPTED after Ctrl-C; otherwise RESTART_HELPS, since a scheduler asked the run to make room.
    """


# AutoGraph: the lines of code that led to the exception, then the exception.
_TRACED = r"in user code:\n(?s:.*?)\n\n {4}(?P<kind>\w+): (?P<text>(?s:.*))"
# Patterns of the text that Keras and TensorFlow wrap around the message of an
# exception in the user's code. Group `text` is that message, and group `kind`, if
# there is one, the exception's type.
_WRAPPINGS = (
    _TRACED,
    # Keras: the layer, the message in bold, and the arguments of the call.
    r"['\"]?Exception encountered when calling .*\n\s*\x1b\[1m(?P<text>(?s:.*))\x1b\[0m(?s:.*)",
    r"Could not automatically infer the output shape .* Error encountered:\n\n(?P<text>(?s:.*))",
    # A Python function in a graph: its traceback, which ends with the exception.
    r"Graph execution error:\n(?s:.*)\nTraceback \(most recent call last\):\n(?s:.*)\n(?P<kind>\w+): (?P<text>(?s:.*))",
    # A Python function in a data set that is read outside a graph.
    r"\{\{.*\}\} Error in user-defined function passed to .* iterator: \S+ (?P<kind>\w+): (?P<text>(?s:.*))",
    # Any other operation: where it was added to the graph, then the message.
    r"Graph execution error:(?:\s*\n(?:Detected at .*| *File .*|<stack .*))*\s*\n(?P<text>(?s:.*))",
    # Names of nodes at the end.
    r"(?P<text>(?s:.*?))\s*\[\[\{\{(?s:.*)",
)
_PACKAGE = f"{Path(__file__).parent}/"
_NOT_USER_CODE = (_PACKAGE, sysconfig.get_path("stdlib"), "<")


def message_of(error: BaseException) -> str:
    """Returns the message of a UserError in one line, short and without control characters.

    >>> message_of(ConfigError("train.epochs=\\x1b[31m is\\nnot a number"))
    'train.epochs=\\\\x1b[31m is not a number'
    >>> message_of(ConfigError("in user code:\\n\\n    File 'a', line 2, in f\\n\\n    ConfigError: stop"))
    'stop'
    """
    text = str(error).strip()
    # An error that was raised while a function was traced; one function may call another.
    while match := re.fullmatch(_TRACED, text):
        text = match["text"].strip()
    text = " ".join(text.split())
    # A terminal would act on control characters in a value.
    text = re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)
    # Cut in the middle: the beginning names the setting and the end gives advice,
    # but a value may be of any length.
    if len(text) > MAX_MESSAGE_LENGTH:
        text = f"{text[: MAX_MESSAGE_LENGTH // 2]} ... {text[-MAX_MESSAGE_LENGTH // 2 :]}"
    return text


def in_one_line(error: BaseException) -> str:
    """Returns the exception's type and the first line of its message, without what Keras and TensorFlow add.

    >>> in_one_line(ValueError("in user code:\\n\\n    File 'a', line 2, in f  *\\n        f()\\n\\n    KeyError: 'x'"))
    "KeyError: 'x'"
    """
    name = type(error).__name__
    text = _unescaped_text(error)
    while True:  # Wrappings are nested.
        matches = (re.fullmatch(pattern, text) for pattern in _WRAPPINGS)
        match = next(filter(None, matches), None)
        if match is None:
            break
        name = match.groupdict().get("kind") or name
        text = match["text"].strip()

    text = " ".join(text.partition("\n")[0].split())
    if len(text) > 300:
        text = f"{text[:300]} ..."
    return f"{name}: {text}".rstrip(": ")


def first_line(error: BaseException) -> str:
    """Returns the first line of the exception's message, without a full stop; its type if it has none.

    >>> first_line(OSError("Invalid footer.\\nMore on that")), first_line(EOFError())
    ('Invalid footer', 'EOFError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def location_of(error: BaseException) -> str:
    """Returns the innermost line of the user's own code that hvtrain called, as "FILE, line N".

    Returns "the function NAME" if only code that AutoGraph generated from that function is known, and "" if the
    traceback contains no user code.
    """
    frames = [
        (frame.filename, str(frame.lineno), frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    # In a graph the message has the frames that the traceback lacks.
    frames += re.findall(r'File "([^"]+)", line (\d+), in (\S+)', _unescaped_text(error))
    first_frame = next(
        (index for index, (file, *_) in enumerate(frames) if file.startswith(_PACKAGE)), 0
    )

    lines = []
    functions = []
    for file, line, name in frames[first_frame:]:
        if file.startswith(_NOT_USER_CODE) or re.search("/(site|dist)-packages/", file):
            continue
        if "__autograph_generated_file" in file:  # A line of generated code tells the user nothing.
            functions.append(f"the function {name}")
        else:
            lines.append(f"{file}, line {line}")
    return (lines or functions or [""])[-1]


def cause_of(error: BaseException) -> str:
    """Returns in_one_line(error) and, in parentheses, location_of(error) if there is one."""
    location = location_of(error)
    return in_one_line(error) + (f" ({location})" if location else "")


def _unescaped_text(error: BaseException) -> str:
    """Returns the error's text. Undoes escapes, since a KeyError's text is the repr of its message."""
    return str(error).replace("\\n", "\n").replace("\\x1b", "\x1b").strip()
