"""Which requests ``inflight whatif`` runs: the recorded ones, made-up ones, or those of a trace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inflight_backend.errors import ConfigurationError

if TYPE_CHECKING:
    from inflight_scheduler.recording.text_book import TextBook
    from inflight_scheduler.recording.workload import Job, RecordedWorkload

DEFAULT_NUM_MADE_UP = 500
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Requests:
    """What is predicted. ``num_recorded_steps``: of the recording, where its requests run."""

    jobs: Sequence[Job]
    book: TextBook | None = None
    num_recorded_steps: int | None = None
    num_found: int = 0
    num_unended: int = 0
    num_left_out: int = 0

    @property
    def are_recorded(self) -> bool:
        """True where the recording has measured them."""
        return self.num_recorded_steps is not None


@dataclass(frozen=True, slots=True)
class OtherRequests:
    """The options that ask for others than the recorded ones, as the command line has them."""

    trace: Path | None
    columns: str | None
    unit: str | None
    block: int | None
    speed: float | None
    rate: float | None
    prompt: str
    output: str
    num_requests: int | None
    seed: int

    def read(self, recorded: RecordedWorkload) -> Requests:
        """The requests to run; those ``recorded``, if no others are asked for."""
        from inflight_scheduler.recording.workload import make_workload

        if self.trace is not None:
            return self._read_trace(self.trace)
        for option, value in (
            ("--trace-columns", self.columns),
            ("--trace-unit", self.unit),
            ("--trace-block", self.block),
            ("--speed", self.speed),
        ):
            if value is not None:
                raise ConfigurationError(f"{option} is about a trace: name its file with --trace")
        if self.rate is not None:
            lengths = _parse_range("--prompt", self.prompt), _parse_range("--output", self.output)
            count = self.num_requests or DEFAULT_NUM_MADE_UP
            return Requests(make_workload(self.rate, *lengths, count, self.seed))
        return Requests(
            recorded.jobs,
            recorded.book,
            recorded.num_steps,
            num_found=recorded.num_found,
            num_unended=recorded.num_unended,
        )

    def _read_trace(self, path: Path) -> Requests:
        from inflight_scheduler.recording.request_trace import TraceOptions, read_trace

        if self.rate is not None and self.speed is not None:
            raise ConfigurationError("--speed is about the times of the trace, --rate makes others")
        options = TraceOptions(
            columns=_parse_columns(self.columns),
            unit=_parse_unit(self.unit),
            hash_tokens=self.block,
            num_requests=self.num_requests,
            rate=self.rate,
            speed=self.speed or 1.0,
            seed=self.seed,
        )
        traced = read_trace(path, options)
        return Requests(traced.jobs, traced.book, num_left_out=traced.num_left_out)


def _parse_columns(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) != 3 or not all(names):
        raise ConfigurationError(
            f"--trace-columns {text}: write three names, as arrival,prompt_tokens,output_tokens"
        )
    return names


def _parse_unit(text: str | None) -> str | None:
    from inflight_scheduler.recording.request_trace import UNITS

    if text is not None and text not in UNITS:
        raise ConfigurationError(f"--trace-unit {text}: choose one of {', '.join(UNITS)}")
    return text


def _parse_range(option: str, text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text.strip())
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not 1 <= low <= high <= 2**20:
        raise ConfigurationError(f"{option} {text}: write a number of tokens, or two, as 50-200")
    return low, high
