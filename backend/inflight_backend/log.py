"""Loggers that write types and frames of an exception, but not its message.

An exception that is raised while a request is in hand may quote it: a tokenizer's panic holds the
prompt. So the log gets the types and the frames. Every logger of this package is one of these, so
that ``_logger.exception`` may be written anywhere.
"""

from __future__ import annotations

import logging
import traceback

_TELLING = frozenset({"MemoryError", "OutOfMemoryError", "AcceleratorError"})
"""Types whose first line is written too: it is about the machine. (By name: two are torch's.)"""


def get_logger(name: str) -> logging.Logger:
    """The logger ``name``, which leaves out what exceptions say."""
    logger = logging.getLogger(name)
    logger.addFilter(_leave_out_messages)
    return logger


def _leave_out_messages(record: logging.LogRecord) -> bool:
    """Put our text of the exception where formatters look for a text that is ready."""
    if record.exc_info and record.exc_info[1] is not None:
        error, record.exc_info = record.exc_info[1], None
        try:
            record.exc_text = _describe(error)
        except BaseException:  # logging guards only its handlers
            record.exc_text = type(error).__name__
    return True


def _describe(error: BaseException) -> str:
    """Types and frames of an exception and of those it came from, the first cause first."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.insert(0, following)
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context
    return "\nwhich led to\n".join(
        "".join(traceback.format_tb(each.__traceback__)) + _name(each) for each in chain
    )


def _name(error: BaseException) -> str:
    kind = type(error).__name__
    if _TELLING.isdisjoint(base.__name__ for base in type(error).__mro__):
        return kind
    return f"{kind}: {str(error).partition(chr(10))[0]}"
