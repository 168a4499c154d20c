"""Write the table of fields into docs/clients.md from `inflight_openai.schema`;
``--check`` only compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence

from page import table, write_or_check

from inflight_openai.schema import OTHERS, ChatBody, CompletionBody, Fields, OtherFields

BEGIN = "<!-- the table: python tools/write_clients_docs.py -->\n"
END = "<!-- its end -->\n"


def render(old: str) -> str:
    """The page with its table."""
    head, _, rest = old.partition(BEGIN)
    fields = table(("field", "of", "becomes"), _rows())
    return f"{head}{BEGIN}{fields}{END}{rest.partition(END)[2]}"


def _rows() -> Iterator[Sequence[str]]:
    for group in Fields.__subclasses__():
        calls = [body.call for body in (CompletionBody, ChatBody) if issubclass(body, group)]
        action = "honoured" if len(calls) == 2 else f"honoured ({calls[0]})"
        note = " ".join((group.__doc__ or "").split())
        yield _names(group.model_fields), group.origin, f"{action}: {note}"
    for others in OTHERS:
        yield _names(others.names), others.origin, f"{_action(others)}: {others.note}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _action(others: OtherFields) -> str:
    if not others.is_refused:
        return "ignored"
    neutral = (json.dumps({name: each[0]})[1:-1] for name, each in others.neutral.items())
    values = ", ".join(f"`{each}`" for each in neutral)
    return f"refused, but for {values}" if values else "refused"


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, "clients.md", render))
