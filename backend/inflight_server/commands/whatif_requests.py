"""Which requests ``inflight whatif`` runs: the recorded ones, made-up ones, or those of a trace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inflight_backend.errors import ConfigurationError

if TYPE_CHECKING:
    from inflight_recorder.text_book import TextBook

    from inflight_recorder.workload import Job, RecordedWorkload

DEFAULT_PROMPT, DEFAULT_OUTPUT = "64-512", "16-256"
DEFAULT_NUM_MADE_UP = 500
_ABOUT_A_TRACE = "is about a trace: name its file with --trace"
_ABOUT_MADE_UP = "is about requests that are made up: give their --rate, and no --trace"
_ABOUT_ITS_TIMES = "is about the times of the trace, --rate makes others"
_ABOUT_RANDOM_ONES = "is about requests that come at random: give their --rate"
_ABOUT_OTHERS = "is about others than the recorded ones: give a --rate or a --trace"
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
    prompt: str | None
    output: str | None
    num_requests: int | None
    seed: int | None

    def read(self, recorded: RecordedWorkload) -> Requests:
        """The requests to run; those ``recorded``, if no others are asked for."""
        from inflight_recorder.workload import make_workload

        self._check()
        if self.trace is not None:
            return self._read_trace(self.trace)
        if self.rate is not None:
            lengths = (
                _parse_range("--prompt", self.prompt, DEFAULT_PROMPT),
                _parse_range("--output", self.output, DEFAULT_OUTPUT),
            )
            count = self.num_requests or DEFAULT_NUM_MADE_UP
            return Requests(make_workload(self.rate, *lengths, count, self.seed or 0))
        return Requests(
            recorded.jobs,
            recorded.book,
            recorded.num_steps,
            num_found=recorded.num_found,
            num_unended=recorded.num_unended,
        )

    def _check(self) -> None:
        """`ConfigurationError` for an option that would count for nothing."""
        has_trace, has_rate = self.trace is not None, self.rate is not None
        for option, value, counts, why in (
            ("--trace-columns", self.columns, has_trace, _ABOUT_A_TRACE),
            ("--trace-unit", self.unit, has_trace, _ABOUT_A_TRACE),
            ("--trace-block", self.block, has_trace, _ABOUT_A_TRACE),
            ("--speed", self.speed, has_trace, _ABOUT_A_TRACE),
            ("--speed", self.speed, not has_rate, _ABOUT_ITS_TIMES),
            ("--prompt", self.prompt, has_rate and not has_trace, _ABOUT_MADE_UP),
            ("--output", self.output, has_rate and not has_trace, _ABOUT_MADE_UP),
            ("--seed", self.seed, has_rate, _ABOUT_RANDOM_ONES),
            ("--num-requests", self.num_requests, has_trace or has_rate, _ABOUT_OTHERS),
        ):
            if value is not None and not counts:
                raise ConfigurationError(f"{option} {why}")

    def _read_trace(self, path: Path) -> Requests:
        from inflight_recorder.request_trace import TraceOptions, read_trace

        options = TraceOptions(
            columns=_parse_columns(self.columns),
            unit=_parse_unit(self.unit),
            hash_tokens=self.block,
            num_requests=self.num_requests,
            rate=self.rate,
            speed=self.speed or 1.0,
            seed=self.seed or 0,
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
    from inflight_recorder.request_trace import UNITS

    if text is not None and text not in UNITS:
        raise ConfigurationError(f"--trace-unit {text}: choose one of {', '.join(UNITS)}")
    return text


def _parse_range(option: str, given: str | None, default: str) -> tuple[int, int]:
    text = default if given is None else given
    match = _RANGE.fullmatch(text.strip())
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not 1 <= low <= high <= 2**20:
        raise ConfigurationError(f"{option} {text}: write a number of tokens, or two, as 50-200")
    return low, high
