"""What the stand-ins of a server print."""

from __future__ import annotations

import re


def without_grpc(log: str) -> str:
    """``log`` without what gRPC says in a forked child, if other tests of this process used it."""
    return "".join(line for line in log.splitlines(True) if not re.match(r"[EIW]\d{4} ", line))
