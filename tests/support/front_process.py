"""``inflight openai`` as a process, for tests that talk to it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support.server_process import HOST, START_SECONDS, free_ports

_STOP_SECONDS = 30.0


class FrontProcess:
    """One run of ``inflight openai`` on a free port; a context manager for those that are to be
    ready."""

    def __init__(self, folder: Path, url: str, options: Sequence[str] = ()) -> None:
        [self.port] = free_ports(1)
        self._log = folder / f"front-{self.port}"
        command = [str(Path(sys.executable).parent / "inflight"), "openai", f"--url={url}"]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, f"--port={self.port}", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def url(self) -> str:
        """Base of its calls, without ``/v1``."""
        return f"http://{HOST}:{self.port}"

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def __enter__(self) -> FrontProcess:
        """Return when it takes requests; fail if it ends before."""
        try:
            self._wait_until_ready()
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """End it; it must end well, unless the block has failed anyway."""
        self.process.send_signal(signal.SIGTERM)  # nothing for one that has ended
        try:
            code = self.process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert error is not None or code == 0, self.output

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while "is ready" not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
