"""EBNF as TensorRT-LLM's users write it (that of xgrammar and llama.cpp), for llguidance.

Accepted: rules ``name ::= ...`` of which ``root`` is the answer, each until the next line that
begins with another; "literals", [classes], ``.``, rule names, (groups), ``|``, ``*``, ``+``, ``?``,
``{n}``, ``{n,}``, ``{n,m}``, and # comments. Escapes are those of either: \\xHH, \\uHHHH and
\\UHHHHHHHH (each a character), control characters as in C, \\0 and \\e, marks that have a meaning.
Everything else is refused.
"""

from __future__ import annotations

import re

from llguidance import gbnf_to_lark as gbnf

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.bounds import MAX_SYMBOLS, check_unrolled
from inflight_backend.guided.guide import GUIDE_FIELD
from inflight_backend.guided.terminals import join_terminals

MAX_RULES = 256
"""Rules of one grammar."""

_SPECIAL_IN_CLASS = ("&&", "--", "~~")  # set operations of the regexes the classes become
_ANYTHING = "[^]"
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_CONTROLS = dict(zip("0abefnrtv", "\0\a\b\x1b\f\n\r\t\v", strict=True))
_MARKS, _MARKS_IN_CLASS = "\"\\[]/'?", "\"\\[]/'?^$.*+(){}|-"
_BREAK = re.compile(r"(?:[\r\n]|#[^\n]*)(?:\s|#[^\n]*)*")
_RULE = re.compile(r"[\w-]+\s*::=")


def to_lark(text: str) -> str:
    """The grammar in Lark's syntax; `InvalidRequest` says what is not accepted."""
    try:
        rules = gbnf.GrammarParser().parse(_normalise(text))
        if len(rules) > MAX_RULES:
            raise InvalidRequest(f"'{GUIDE_FIELD}' has {len(rules)} rules, more than {MAX_RULES}")
        ordered = _link(rules)
        check_unrolled(sum(map(_size, ordered)), MAX_SYMBOLS)
        ordered = join_terminals(ordered)
        for rule in ordered:
            _wrap_repetitions(rule)
    except InvalidRequest:
        raise
    except RecursionError:
        raise InvalidRequest(f"'{GUIDE_FIELD}' is nested too deeply") from None
    except Exception as error:  # the converter raises bare Exception for a bad grammar
        raise InvalidRequest(f"'{GUIDE_FIELD}' is no EBNF grammar: {error}") from None
    return "\n".join(map(str, ordered)) + "\n"


def _link(rules: dict[str, gbnf.RuleNode]) -> list[gbnf.RuleNode]:
    """The rules in their order, with names for Lark, and references that lead to them.

    As terminals, which Lark tells by their names, rules would match greedily: "a ::= [a-z]*" would
    swallow what follows it.
    """
    if "root" not in rules:
        raise ValueError("there is no rule 'root'")
    for order, (name, rule) in enumerate(rules.items()):
        rule.name = "start" if name == "root" else f"rule{order}"
        rule.comment = ""
        rule.alternatives = rule.alternatives.simplify()
        waiting = list(rule.children())
        while waiting:
            node = waiting.pop()
            waiting += node.children()
            if isinstance(node, gbnf.RuleRefNode):
                if node.name not in rules:
                    raise ValueError(f"there is no rule {node.name!r}")
                node.target = rules[node.name]
    return list(rules.values())


def _normalise(text: str) -> str:
    """Without comments, with escapes the converter knows, and one line for each rule."""
    pieces: list[str] = []
    index, closing = 0, ""
    while index < len(text):
        character = text[index]
        if character == "\\" and closing and (match := _ESCAPE.match(text, index)):
            pieces.append(_escape(match, closing))
            index = match.end()
            continue
        if closing:
            if closing == "]" and text.startswith(_SPECIAL_IN_CLASS, index):
                raise InvalidRequest(
                    f"'{GUIDE_FIELD}' has {text[index : index + 2]} in a [class]; escape it"
                )
            closing = "" if character == closing else closing
            is_control = character < " " or character == "\x7f"
            character = f"\\x{ord(character):02X}" if is_control else character
        elif text.startswith(_ANYTHING, index):
            index += len(_ANYTHING)
            pieces.append("[\\x00-\U0010ffff]")
            continue
        elif character in '"[':
            closing = '"' if character == '"' else "]"
        elif match := _BREAK.match(text, index):
            index = match.end()
            pieces.append("\n" if _RULE.match(text, index) else " ")
            continue
        pieces.append(character)
        index += 1
    return "".join(pieces)


def _escape(match: re.Match[str], closing: str) -> str:
    """An escape as the converter takes it: some it passes on or mistakes, many it does not know."""
    digits = match[1] or match[2] or match[3]
    mark = match[0][1]
    if digits is not None:
        code = int(digits, 16)
    elif mark in (_MARKS_IN_CLASS if closing == "]" else _MARKS):
        code = ord(mark)
    elif mark in _CONTROLS:
        code = ord(_CONTROLS[mark])
    else:
        raise InvalidRequest(f"'{GUIDE_FIELD}' has {match[0]}, which is no escape")
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise InvalidRequest(f"'{GUIDE_FIELD}' has {match[0]}, which is no character")
    return f"\\x{code:02X}" if code <= 0x7F else chr(code)


def _wrap_repetitions(node: gbnf.ASTNode) -> None:
    """Put a repetition of a repetition in brackets, which the converter forgets, and in the place
    of what is repeated no times, which Lark refuses, nothing."""
    for child in node.children():
        _wrap_repetitions(child)
    if isinstance(node, gbnf.RepetitionNode):
        if node.max_times == 0:
            node.node, node.max_times = gbnf.LiteralNode(""), 1
        elif isinstance(node.node, gbnf.RepetitionNode):
            node.node = gbnf.SequenceNode([node.node])


def _size(node: gbnf.ASTNode) -> int:
    """Symbols with every repetition written out; a rule's name is one."""
    size = max(sum(map(_size, node.children())), 1)
    if isinstance(node, gbnf.RepetitionNode):
        size *= max(node.min_times, node.max_times or 0, 1)
    return size
