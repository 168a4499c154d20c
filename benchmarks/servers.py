"""Servers to measure: started and stopped as the tests do it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.plain_triton import repository_server
from support.router_process import RouterProcess
from support.server_process import (
    HOST,
    MODEL,
    TRITONSERVER,
    ServeProcess,
    free_ports,
    start_serve,
)

__all__ = [
    "HOST",
    "MODEL",
    "TRITONSERVER",
    "RouterProcess",
    "ServeProcess",
    "free_ports",
    "repository_server",
    "start_serve",
]
