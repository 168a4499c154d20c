"""Loggers that write types and frames of an exception, but not its message.

An exception raised while a request is processed may quote it: a tokenizer's panic holds the prompt.
So the log gets types and frames. All loggers of this package come from here, so any code may call
``_logger.exception``.
"""

from __future__ import annotations

import logging
import traceback

_TELLING = frozenset({"MemoryError", "OutOfMemoryError", "AcceleratorError"})
"""Types whose first line, about the machine, is also written. (By name: two are torch's.)"""


def get_logger(name: str) -> logging.Logger:
    """The logger ``name``, which leaves out the messages of exceptions."""
    logger = logging.getLogger(name)
    logger.addFilter(leave_out_messages)
    return logger


def leave_out_messages(record: logging.LogRecord) -> bool:
    """Put our text of the exception where formatters look for a cached one."""
    if record.exc_info and record.exc_info[1] is not None:
        error, record.exc_info = record.exc_info[1], None
        try:
            record.exc_text = _describe(error)
        except BaseException:  # logging guards only its handlers
            record.exc_text = type(error).__name__
    return True


def _describe(error: BaseException) -> str:
    """Types and frames of an exception and its causes, the first cause first."""
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
