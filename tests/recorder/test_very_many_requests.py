"""Pictures of 100,000 requests: bounded memory, bounded time, and no larger than promised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from inflight_recorder.header import Header
from inflight_recorder.lines import LineWriter

from inflight_recorder.settings import Settings
from inflight_scheduler import CapacitySchedulerPolicy

pytestmark = pytest.mark.slow

NUM_REQUESTS, AT_ONCE = 100_000, 200
SETTINGS = Settings(CapacitySchedulerPolicy.MAX_UTILIZATION, 4000, 16, 2 * AT_ONCE, 4096)
MAX_MEMORY = 400 * 2**20  # address space, of which 140 MB are used
MAX_CPU_SECONDS = 60  # 8 are needed

DRAW = """
import resource, sys
from pathlib import Path
from inflight_recorder.storage import open_recording
from inflight_recorder.timeline import build_timeline
from inflight_recorder.exporters import write_page
from inflight_recorder.exporters import write_svg

resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[3]), int(sys.argv[3])))
folder = Path(sys.argv[1])
with open_recording(folder / "recording.jsonl") as reader:
    history = build_timeline(reader)
print(len(history.rows), sum(row.num_generated for row in history.rows))
(folder / "svg").write_text(write_svg(history))
with (folder / "page").open("w") as file:
    file.writelines(write_page(history))
"""


def write_recording(file: Path) -> None:
    """In every iteration 200 requests arrive and compute their prompts, and those of the one
    before draw their second and last token."""
    with file.open("w") as lines:
        lines.write(LineWriter().header(Header(SETTINGS)))
        before: list[int] = []
        for index in range(NUM_REQUESTS // AT_ONCE + 1):
            first = index * AT_ONCE
            new = list(range(first, min(first + AT_ONCE, NUM_REQUESTS)))
            content = {
                "i": index + 1,
                "t": 1000 * index,
                "d": 900,
                "a": [[number, 4, 2] for number in new],
                "c": [value for number in new for value in (number, 4)],
                "g": before,
                "f": SETTINGS.num_blocks - len(new) - len(before),
            }
            lines.write(json.dumps(content) + "\n")
            before = new


@pytest.mark.case(116)
def test_pictures_of_very_many_requests_are_bounded(tmp_path: Path) -> None:
    write_recording(tmp_path / "recording.jsonl")
    command = [sys.executable, "-c", DRAW, str(tmp_path), str(MAX_MEMORY), str(MAX_CPU_SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(NUM_REQUESTS), str(2 * NUM_REQUESTS)]
    ElementTree.parse(tmp_path / "svg")
    assert (tmp_path / "svg").stat().st_size < 100_000  # of any number of requests
    assert (tmp_path / "page").stat().st_size < 100 * NUM_REQUESTS
