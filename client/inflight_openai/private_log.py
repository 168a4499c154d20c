"""A logger that writes where an exception came from, and not what it says.

It may quote the request that was in hand; so may what aiohttp says of bytes that are no HTTP.
"""

from __future__ import annotations

import logging
import traceback


def get_logger(name: str) -> logging.Logger:
    """The logger ``name``, which leaves out what exceptions say."""
    logger = logging.getLogger(name)
    logger.addFilter(_leave_out_messages)
    return logger


def _leave_out_messages(record: logging.LogRecord) -> bool:
    """Put our text of the exception where formatters look for a text that is ready."""
    if record.exc_info and record.exc_info[1] is not None:
        error, record.exc_info = record.exc_info[1], None
        record.exc_text = type(error).__name__
        try:
            record.exc_text = "".join(traceback.format_tb(error.__traceback__)) + record.exc_text
        except BaseException:  # logging guards its handlers only, and whoever logs is in trouble
            return True
    return True
