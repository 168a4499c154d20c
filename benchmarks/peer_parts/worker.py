"""The process of one engine: makes it, then answers line by line until its input ends.

    worker.py NAME BUDGET   (as JSON)

A line of input is a piece of work, ``{"prompts": [[...]], "output_lens": [...]}``; a line of output
is ``{"facts": ...}`` first, then one `Done` per piece of work, or ``{"error": ...}`` and the end.
Whatever the engine prints goes to stderr: standard output belongs to the conversation.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from importlib import import_module
from typing import Any, TextIO


def main() -> None:
    """Talk until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    name, budget_json = sys.argv[1:]
    try:
        _serve(name, json.loads(budget_json), answers)
    except Exception as error:  # a peer may fail in any way: that is a row, not a crash
        text = f"{type(error).__name__}: {error}"[:600]
        answers.write(json.dumps({"error": text}) + "\n")
        answers.flush()
        sys.stderr.flush()
        os._exit(1)  # engines leave threads and children that would not end


def _serve(name: str, fields: dict[str, Any], answers: TextIO) -> None:
    from peer_parts.work import Budget

    start, budget = time.perf_counter(), Budget(**fields)
    engine = import_module(f"peer_parts.engines.{name}").Engine(budget)
    facts = {**engine.facts(), "start_seconds": round(time.perf_counter() - start, 1)}
    answers.write(json.dumps({"facts": facts}, default=str) + "\n")
    for line in sys.stdin:
        work = json.loads(line)
        done = engine.generate(work["prompts"], work["output_lens"])
        answers.write(json.dumps(asdict(done), default=str) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
