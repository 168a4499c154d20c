"""Write the table of fields into docs/clients.md from `inflight_openai.schema`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from page import table, write

from inflight_openai.schema import GROUPS, FieldGroup

BEGIN = "<!-- the table: python tools/write_clients_docs.py -->\n"
END = "<!-- its end -->\n"


def render(old: str) -> str:
    """The page with its table."""
    head, _, rest = old.partition(BEGIN)
    fields = table(("field", "of", "becomes"), _rows())
    return f"{head}{BEGIN}{fields}{END}{rest.partition(END)[2]}"


def _rows() -> Iterator[Sequence[str]]:
    for group in GROUPS:
        names = ", ".join(f"`{name}`" for name in group.names)
        yield names, group.origin, f"{_action(group)}: {group.note}"


def _action(group: FieldGroup) -> str:
    action = f"{group.action.value} ({group.call})" if group.call else group.action.value
    neutral = (json.dumps({name: each[0]})[1:-1] for name, each in group.neutral.items())
    values = ", ".join(f"`{each}`" for each in neutral)
    return f"{action}, but for {values}" if values else action


if __name__ == "__main__":
    write(__doc__, "clients.md", render)
