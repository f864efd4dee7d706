"""What a rank does when it fails: the others learn why, and a failure of theirs that came first is named instead."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvtrain.strategies.base import Strategy
from hvtrain.system import console


@contextmanager
def failing_together(strategy: Strategy, note: Callable[[BaseException], None] | None = None) -> Iterator[None]:
    """If the block fails, tells the other ranks why. Raises the failure of another rank if that came first.

    note: takes the cause, before the others learn it.
    """
    try:
        yield
    except BaseException as error:
        console.take_signals(console.note_signal)
        cause = strategy.cause_of(error)
        if note:
            note(cause or error)
        strategy.report_failure(cause or error)
        if cause:
            raise cause from error
        raise
