"""What cannot be said changes nothing, to the exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from inflight_backend.serve.messages import say

SAYS_AND_ENDS = """
import sys
from inflight_backend.serve.messages import drop_unsaid, say
say("ready")
say("stopping", err=True)
drop_unsaid()
sys.exit(int(sys.argv[1]))
"""


def test_a_line_goes_where_it_should(capfd: pytest.CaptureFixture[str]) -> None:
    say("ready")
    say("stopping", err=True)
    assert capfd.readouterr() == ("ready\n", "stopping\n")


@pytest.mark.parametrize(
    "unheard",
    ["the reader is gone", "the reader does not read", "the disk is full"],
    indirect=True,
)
@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_is_the_one_that_was_meant(unheard: int, code: int) -> None:
    """Python ends with 120 when there is something left that it cannot write."""
    command = [sys.executable, "-c", SAYS_AND_ENDS, str(code)]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # nothing is ever left without a buffer
    ended = subprocess.run(command, env=environment, stdout=unheard, stderr=unheard, timeout=60)
    assert ended.returncode == code
