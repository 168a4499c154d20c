"""An answer as a response of OpenAI's newer API: items of output, and events while they grow."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from inflight_openai.generation import GenerationRequest
from inflight_openai.prompts import TokenOf
from inflight_openai.responses import CachedTokens, Head, PartsOfAnswer, chat_log_probs, new_call_id
from inflight_openai.tools.reader import Part
from inflight_openai.triton_client import Piece

_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}


class ResponseWriter:
    """Puts one response together, and writes the events of it."""

    def __init__(
        self,
        head: Head,
        request: GenerationRequest,
        token_of: TokenOf,
        count_tokens: Callable[[str], int],
    ) -> None:
        """``count_tokens``: of a text, for the usage of thoughts."""
        self.num_tokens = 0
        self._cached = CachedTokens(request)
        self._request = request
        self._token_of = token_of
        self._count_tokens = count_tokens
        self._parts = PartsOfAnswer(request)
        self._items: list[dict[str, Any]] = []
        self._open: Part | None = None  # of the last item, while it grows
        self._reason = ""
        self._num_events = 0
        self._response: dict[str, Any] = {
            "id": head.answer_id,
            "object": "response",
            "created_at": head.created,
            "status": "in_progress",
            "model": head.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": False,
            **(request.response_fields or {}),
            "usage": None,
        }
        self._opening = b"".join(
            self._event(f"response.{kind}", response=self._response)
            for kind in ("created", "in_progress")
        )

    def add(self, piece: Piece) -> None:
        """Append the next piece."""
        self.piece(piece)

    def piece(self, piece: Piece) -> bytes:
        """The events of ``piece``; empty if it adds nothing yet."""
        self._cached.add(piece)
        self.num_tokens += piece.num_tokens
        self._reason = self._reason or piece.reason
        rows = chat_log_probs(piece.log_probs, self._token_of)["content"]
        events = [self._grow(part, rows) for part in self._parts.feed(piece.text)]
        opening = b""
        if events:
            opening, self._opening = self._opening, b""
        return opening + b"".join(events)

    def ending(self) -> bytes:
        """The last events."""
        events = [self._grow(part, ()) for part in self._parts.finish()]
        is_cut = self._parts.finish_reason(self._reason) == "length"
        status = "incomplete" if is_cut else "completed"
        events.append(self._close(status))
        num_prompt = len(self._request.prompts[0])
        thoughts = "".join(
            item["content"][0]["text"] for item in self._items if item["type"] == "reasoning"
        )
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {
                    "cached_tokens": self._cached.number,
                    "cache_write_tokens": 0,  # writing costs clients nothing here
                },
                "output_tokens": self.num_tokens,
                "output_tokens_details": {
                    "reasoning_tokens": self._count_tokens(thoughts) if thoughts else 0
                },
                "total_tokens": num_prompt + self.num_tokens,
            },
        }
        events.append(self._event(f"response.{status}", response=self._response))
        return self._opening + b"".join(events)

    def encode(self) -> bytes:
        """The body of a response that is not streamed."""
        self.ending()
        return json.dumps(self._response).encode()

    def _grow(self, part: Part, rows: Sequence[dict[str, Any]]) -> bytes:
        """The events of one part, which begins a new item or goes on with the last one."""
        events = []
        before = self._open
        if before is None or (before.kind, before.index) != (part.kind, part.index):
            events += [self._close(), self._begin(part)]
        item = self._items[-1]
        if part.kind == "call":
            item["arguments"] += part.text
            events.append(self._item_event("function_call_arguments.delta", delta=part.text))
        elif part.kind == "reasoning":
            item["content"][0]["text"] += part.text
            events.append(self._text_event("reasoning_text.delta", delta=part.text))
        else:
            content = item["content"][0]
            content["text"] += part.text
            content["logprobs"] += rows
            events.append(
                self._text_event("output_text.delta", delta=part.text, logprobs=list(rows))
            )
        return b"".join(events)

    def _begin(self, part: Part) -> bytes:
        item: dict[str, Any] = {"id": f"{_PREFIXES[part.kind]}_{uuid.uuid4().hex}"}
        content: dict[str, Any] | None = None
        if part.kind == "call":
            item |= {"type": "function_call", "call_id": new_call_id(), "name": part.name}
            item |= {"arguments": "", "status": "in_progress"}
        elif part.kind == "reasoning":
            content = {"type": "reasoning_text", "text": ""}
            item |= {"type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        else:
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"type": "message", "role": "assistant", "content": []}
            item["status"] = "in_progress"
        self._items.append(item)
        self._open = part
        place = len(self._items) - 1
        event = self._event("response.output_item.added", output_index=place, item=item)
        if content is not None:
            event += self._text_event("content_part.added", part=content)
            item["content"].append(content)
        return event

    def _close(self, status: str = "completed") -> bytes:
        """The events that end the last item."""
        if self._open is None:
            return b""
        item, kind, self._open = self._items[-1], self._open.kind, None
        item["status"] = status
        if kind == "call":
            arguments = item["arguments"]
            event = self._item_event(
                "function_call_arguments.done", arguments=arguments, name=item["name"]
            )
        else:
            [content] = item["content"]
            name, more = "reasoning_text.done", {}
            if kind == "content":
                name, more = "output_text.done", {"logprobs": content["logprobs"]}
            event = self._text_event(name, text=content["text"], **more)
            event += self._text_event("content_part.done", part=content)
        place = len(self._items) - 1
        return event + self._event("response.output_item.done", output_index=place, item=item)

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """An event of the last item."""
        place, item_id = len(self._items) - 1, self._items[-1]["id"]
        return self._event(f"response.{kind}", item_id=item_id, output_index=place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()
