"""Options of OpenAI's side that `inflight openai` and `inflight serve` take alike.

No import of what needs the extra ``openai``: `inflight serve` starts the other as a process.
"""

# ruff: noqa: RUF009 (each call makes a field)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, get_type_hints

import typer


def _option(default: object, name: str, **rest: Any) -> Any:
    """A field that is the option ``name``, with ``rest`` of typer's."""
    return field(default=default, metadata={"option": typer.Option(default, name, **rest)})


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """What is served, and to whom; times in seconds, sizes in bytes.

    ``served_name``: name of the model for clients; None takes the server's name for it.
    ``tool_parser``: name of the format of tool calls; None takes what the chat template tells.
    ``default_max_tokens``: bound of a chat answer whose request names none; None is all that fits.
    ``timeout``: for a request, from its head to the last byte of its answer.
    ``is_strict``: refuse unknown fields of a request instead of ignoring them.
    ``loads_adapters``: clients may load and unload adapters, as far as the server lets them.
    ``has_page``: the live page is served; ``shows_text``: with the texts of this front's requests.
    ``allowed_origins``: origins of web pages that may call the front; ``*`` for any.
    """

    served_name: str | None = _option(
        None,
        "--served-model-name",
        help="What clients of OpenAI's API call the model; default: the server's name.",
    )
    chat_template: Path | None = _option(
        None, "--chat-template", help="A Jinja file instead of the checkpoint's chat template."
    )
    tool_parser: str | None = _option(
        None,
        "--tool-parser",
        help="How the model writes tool calls; default: what its template tells.",
    )
    default_max_tokens: int | None = _option(
        None,
        "--default-max-tokens",
        min=1,
        help="Bound of chat answers that name none; default: all that fits.",
    )
    max_requests: int = _option(
        1024,
        "--max-requests",
        min=1,
        help="Requests to OpenAI's API at once; more are answered with 429.",
    )
    max_body_bytes: int = _option(
        8 * 2**20, "--max-body-bytes", min=1024, help="Size of a request body of OpenAI's API."
    )
    timeout: float = _option(
        600.0,
        "--timeout",
        min=0.1,
        help="Seconds for a request to OpenAI's API, until its answer is read.",
    )
    is_strict: bool = _option(
        False, "--strict", help="Refuse unknown fields of requests to OpenAI's API."
    )
    loads_adapters: bool = _option(
        False,
        "--allow-runtime-lora",
        help="Let clients load and unload adapters, of folders below the server's lora_root.",
    )
    has_page: bool = _option(
        True, "--page/--no-page", help="Serve the live page at /, which needs a key where calls do."
    )
    shows_text: bool = _option(
        False, "--show-text", help="Show prompts and answers on the page, to all with a key."
    )
    allowed_origins: list[str] | None = _option(
        None,
        "--allow-origin",
        help="Origin of pages whose browser may call it; * for any; repeatable.",
    )

    def command_line(self) -> list[str]:
        """The options that are not at their defaults, for `inflight openai`; files by absolute
        path."""
        words = []
        for each in fields(FrontOptions):
            value = getattr(self, each.name)
            if value == each.default:
                continue
            [name] = each.metadata["option"].param_decls
            if isinstance(value, bool):
                words.append(name.split("/")[0 if value else -1])
                continue
            for item in value if isinstance(value, list) else [value]:
                words.append(f"{name}={item.absolute() if isinstance(item, Path) else item}")
        return words


def with_front_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` an option for each field of `FrontOptions` in place of its ``front``."""
    types = get_type_hints(FrontOptions)
    options = [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=each.metadata["option"],
            annotation=types[each.name],
        )
        for each in fields(FrontOptions)
    ]

    @wraps(command)
    def with_options(**values: Any) -> None:
        front = FrontOptions(**{name: values.pop(name) for name in types if name in values})
        command(**values, front=front)

    parameters: list[Parameter] = []
    for each in signature(command, eval_str=True).parameters.values():
        own = [each.replace(kind=Parameter.KEYWORD_ONLY)]
        parameters += options if each.name == "front" else own
    with_options.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options
