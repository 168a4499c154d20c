"""What the commands share: errors as one line, and the scheduler of a recording."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from inflight_backend.errors import ServingError
from inflight_backend.user_scheduler import Decision, GuardedScheduler, find_scheduler_class
from inflight_scheduler import (
    BatchPlanner,
    CapacitySchedulerPolicy,
    LlmRequest,
    RequestScheduler,
    check_decision,
)
from inflight_scheduler.recording.errors import RecordingError
from inflight_scheduler.recording.records import Settings
from inflight_scheduler.recording.simulation import MakeScheduler, default_scheduler, scheduler_of

RecordingArgument = Annotated[
    Path, typer.Argument(help="Recording, as the parameter record_file writes it.")
]
SchedulerClassOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:CLASS",
        help="The scheduler of your own that the recording was made with.",
    ),
]


@contextmanager
def reported_errors() -> Iterator[None]:
    """Errors made on purpose become one line on stderr and exit code 1."""
    try:
        yield
    except (ServingError, RecordingError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def scheduler_maker(class_name: str | None) -> MakeScheduler:
    """Makes the scheduler that the settings name, or the user's class as the server runs it.

    The name comes from the command line: a recording never names code to be run.
    """
    if class_name is None:
        return default_scheduler
    scheduler_class = find_scheduler_class(class_name)

    def make(settings: Settings, planner: BatchPlanner) -> RequestScheduler:
        blocks = planner.block_manager
        default = scheduler_of(CapacitySchedulerPolicy.MAX_UTILIZATION, settings, planner)

        def check(
            decision: object, active: Sequence[LlmRequest], inflight_ids: Collection[int]
        ) -> Decision:
            return check_decision(
                decision,
                active,
                inflight_ids,
                block_manager=blocks,
                num_free_slots=planner.num_free_slots,
                max_batch_size=settings.max_batch_size,
                max_num_tokens=settings.max_num_tokens,
                may_chunk=settings.chunking is not None,
            )

        scheduler = scheduler_class(blocks, settings.max_batch_size, settings.max_num_tokens)
        return GuardedScheduler(scheduler, default, check)

    return make
