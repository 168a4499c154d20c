"""What cannot be said changes nothing, to the exit code."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from inflight_server.serve.console import say

SAYS_AND_ENDS = """
import sys
from inflight_server.serve.console import say
say("ready")
say("stopping", err=True)
sys.exit(int(sys.argv[1]))
"""

SAYS_AND_DRAWS_MUCH = """
import sys
from inflight_server.serve import console as messages
messages._PATIENCE_SECONDS = 0.01
drawing = messages.ForgivingStream(sys.stderr)
for size in [900] * 100:
    messages.say("x" * size)
    drawing.write("x" * size)
    drawing.flush()
sys.exit(3)
"""


SHOWS_WHAT_ANOTHER_ONE_SAYS = """
import subprocess, sys
from inflight_server.serve import console as messages
messages._PATIENCE_SECONDS = float(sys.argv[1])
command = [sys.executable, "-c", "print('x' * 3_000_000); print('done')"]
with messages.shown() as output:
    ended = subprocess.run(command, stdout=output, stderr=output, timeout=15)
sys.exit(ended.returncode)
"""


OPENS_WITH_STDERR_CLOSED = """
import os, sys
from inflight_server.serve.console import occupy_standard_descriptors
os.close(0)
os.close(2)
occupy_standard_descriptors()
for number in range(3):
    print(os.readlink(f"/proc/self/fd/{number}"), flush=True)
print(os.open("/dev/zero", os.O_RDONLY) > 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "unheard",
    ["the reader is gone", "the reader does not read", "the disk is full"],
    indirect=True,
)
def test_a_server_whose_log_nobody_reads_does_not_wait(unheard: int) -> None:
    """Not with each piece of it either."""
    command = [sys.executable, "-c", SHOWS_WHAT_ANOTHER_ONE_SAYS, "0.5"]
    assert subprocess.run(command, stdout=unheard, stderr=unheard, timeout=90).returncode == 0


def test_the_log_of_a_server_is_shown_to_its_end() -> None:
    command = [sys.executable, "-c", SHOWS_WHAT_ANOTHER_ONE_SAYS, "20"]
    ended = subprocess.run(command, capture_output=True, timeout=90)
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert ended.stderr == b"x" * 3_000_000 + b"\ndone\n"


def test_a_line_goes_where_it_should(capfd: pytest.CaptureFixture[str]) -> None:
    say("ready")
    say("stopping", err=True)
    assert capfd.readouterr() == ("ready\n", "stopping\n")


@pytest.mark.slow
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


def test_a_terminal_that_stands_still_holds_nobody_up() -> None:
    """A connection to far away that hangs: such a terminal has room and yet does not take a line,
    other than a pipe without a reader."""
    far_end, terminal = pty.openpty()
    try:
        command = [sys.executable, "-c", SAYS_AND_DRAWS_MUCH]
        ended = subprocess.run(command, stdout=terminal, stderr=terminal, timeout=60)
        assert ended.returncode == 3
        assert os.read(far_end, 900), "what it took is there"
    finally:
        os.close(terminal)
        os.close(far_end)


def test_no_file_takes_the_place_of_a_stderr_that_is_closed() -> None:
    told = subprocess.run(
        [sys.executable, "-c", OPENS_WITH_STDERR_CLOSED], stdout=subprocess.PIPE, check=True
    ).stdout.split()
    assert told[0] == told[2] == b"/dev/null"
    assert told[1].startswith(b"pipe:")
    assert told[3] == b"True"
