"""Settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from inflight_backend.errors import ConfigurationError

MODES = ("none", "ngram")


@dataclass(frozen=True, slots=True)
class SpeculativeDecodingConfig:
    """How many tokens are guessed, and by whom.

    ``max_draft_len`` bounds the drafts of a request in one step, those that a client sends
    (``draft_input_ids``) included; 0 allows none. With ``mode`` ngram the server guesses, too: what
    came after an earlier occurrence of the last 2 to ``max_matching_ngram_size`` tokens, while at
    most ``disable_by_batch_size`` requests are active. (Names: TensorRT-LLM's
    `NGramDecodingConfig`, vLLM's `SpeculativeConfig`.)
    """

    mode: str = "none"
    max_draft_len: int = 8
    max_matching_ngram_size: int = 4
    disable_by_batch_size: int = 16

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(
                f"speculative_decoding_mode must be one of {', '.join(MODES)}, not {self.mode!r}"
            )
        for name, minimum in (
            ("max_draft_len", 0),
            ("max_matching_ngram_size", 2),
            ("disable_by_batch_size", 1),
        ):
            if getattr(self, name) < minimum:
                raise ConfigurationError(
                    f"{name} must be at least {minimum}, not {getattr(self, name)}"
                )
        if self.mode == "ngram" and self.max_draft_len == 0:
            raise ConfigurationError(
                "speculative_decoding_mode is ngram, but max_draft_len is 0: no draft could be "
                "verified; raise max_draft_len or set the mode to none"
            )
