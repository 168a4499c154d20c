"""EBNF as TensorRT-LLM's users write it (that of xgrammar and llama.cpp), for llguidance.

Accepted: rules ``name ::= ...`` of which ``root`` is the answer; "literals", [classes], ``.``,
rule names, (groups), ``|``, ``*``, ``+``, ``?``, ``{n}``, ``{n,}``, ``{n,m}``, and # comments.
Escapes are \\n \\r \\t \\\\ \\" \\[ \\] \\- \\xHH (ASCII), \\uHHHH and \\UHHHHHHHH. Everything
else is refused, and so is a rule called ``start``, which Lark needs.
"""

from __future__ import annotations

import re

from llguidance import gbnf_to_lark as gbnf

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.bounds import check_unrolled
from inflight_backend.guided.guide import GUIDE_FIELD

MAX_RULES = 256
"""Rules of one grammar."""

_SPECIAL_IN_CLASS = ("&&", "--", "~~")  # set operations of the regexes the classes become
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_BREAK = re.compile(r"(?:\n|#[^\n]*)(?:\s|#[^\n]*)*")


def to_lark(text: str) -> str:
    """The grammar in Lark's syntax; `InvalidRequest` says what is not accepted."""
    try:
        rules = gbnf.GrammarParser().parse(_normalise(text))
        if len(rules) > MAX_RULES:
            raise InvalidRequest(f"'{GUIDE_FIELD}' has {len(rules)} rules, more than {MAX_RULES}")
        gbnf.resolve(rules)
        ordered = sorted(rules.values(), key=lambda rule: rule.order)
        # As terminals, rules would match greedily: "a ::= [a-z]*" would swallow what follows it.
        for rule in ordered:
            rule.name = "start" if rule.name in ("start", "START") else f"rule{rule.order}"
            rule.comment = ""
        for rule in ordered:
            _wrap_repetitions(rule)
        check_unrolled(sum(map(_size, ordered)))
    except InvalidRequest:
        raise
    except RecursionError:
        raise InvalidRequest(f"'{GUIDE_FIELD}' is nested too deeply") from None
    except Exception as error:  # the converter raises bare Exception for a bad grammar
        raise InvalidRequest(f"'{GUIDE_FIELD}' is no EBNF grammar: {error}") from None
    return "\n".join(map(str, ordered)) + "\n"


def _normalise(text: str) -> str:
    """Without comments, with escapes the converter knows, and one line for each rule's choices."""
    pieces: list[str] = []
    index, closing = 0, ""
    while index < len(text):
        character = text[index]
        if character == "\\" and (match := _ESCAPE.match(text, index)):
            pieces.append(_escape(match, closing))
            index = match.end()
            continue
        if closing:
            if closing == "]" and text.startswith(_SPECIAL_IN_CLASS, index):
                raise InvalidRequest(
                    f"'{GUIDE_FIELD}' has {text[index : index + 2]} in a [class]; escape it"
                )
            closing = "" if character == closing else closing
        elif character in '"[':
            closing = '"' if character == '"' else "]"
        elif match := _BREAK.match(text, index):
            index = match.end()
            pieces.append(" " if text.startswith("|", index) else "\n")
            continue
        pieces.append(character)
        index += 1
    return "".join(pieces)


def _escape(match: re.Match[str], closing: str) -> str:
    """An escape as the converter takes it; it passes \\x on and mistakes others."""
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return "\\x2D" if match[0] == "\\-" and closing == "]" else match[0]
    code = int(digits, 16)
    if match[1] and code > 0x7F:
        raise InvalidRequest(f"'{GUIDE_FIELD}' has {match[0]}; write \\u00{digits} instead")
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise InvalidRequest(f"'{GUIDE_FIELD}' has {match[0]}, which is no character")
    return f"\\x{code:02X}" if code <= 0x7F else chr(code)


def _wrap_repetitions(node: gbnf.ASTNode) -> None:
    """Put a repetition of a repetition in brackets, which the converter forgets."""
    for child in node.children():
        _wrap_repetitions(child)
    if isinstance(node, gbnf.RepetitionNode) and isinstance(node.node, gbnf.RepetitionNode):
        node.node = gbnf.SequenceNode([node.node])


def _size(node: gbnf.ASTNode) -> int:
    """Symbols with every repetition written out; a rule's name is one."""
    size = max(sum(map(_size, node.children())), 1)
    if isinstance(node, gbnf.RepetitionNode):
        size *= max(node.min_times, node.max_times or 0, 1)
    return size
