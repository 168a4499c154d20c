"""More log lines than anybody reads."""

from __future__ import annotations

import os
import subprocess
import sys

LOGS_MUCH = """
import logging, sys
from inflight_openai import messages
messages._PATIENCE_SECONDS = float(sys.argv[1])
logging.root.addHandler(messages.LogHandler())
for number in range(int(sys.argv[2])):
    logging.warning("%d %s", number, "x" * 900)
sys.exit(3)
"""


def test_who_logs_waits_for_nobody_however_much_it_is() -> None:
    reader, unread = os.pipe()
    command = [sys.executable, "-c", LOGS_MUCH, "0.01", "3000"]
    try:
        ended = subprocess.run(command, stdout=unread, stderr=unread, timeout=30)
    finally:
        os.close(reader)
        os.close(unread)
    assert ended.returncode == 3


def test_what_was_logged_last_is_written_when_the_process_ends() -> None:
    command = [sys.executable, "-c", LOGS_MUCH, "30", "900"]
    ended = subprocess.run(command, capture_output=True, timeout=60)
    assert ended.returncode == 3
    assert ended.stderr.decode().splitlines() == [f"{number} {'x' * 900}" for number in range(900)]
