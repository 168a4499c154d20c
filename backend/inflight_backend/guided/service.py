"""Whether this server guides answers, and with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from inflight_backend.errors import ConfigurationError, UnsupportedRequest
from inflight_backend.guided.guide import TYPE_FIELD, Guide
from inflight_backend.models.checkpoint_files import find_file

if TYPE_CHECKING:
    from inflight_backend.guided.compiler import GuideCompiler, PendingGuide

BACKENDS = ("auto", "llguidance", "none")


@dataclass(frozen=True, slots=True)
class GuidedDecodingConfig:
    """``backend``: llguidance, none, or auto for llguidance where it is installed and the model
    has a tokenizer. ``tokenizer_dir`` is the folder of tokenizer.json, None for the checkpoint."""

    backend: str = "auto"
    tokenizer_dir: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigurationError(
                f"guided_decoding_backend is {self.backend!r}: choose one of {', '.join(BACKENDS)}"
            )


class GuideService:
    """Compiles the guides of requests, or says why it does not."""

    def __init__(
        self,
        config: GuidedDecodingConfig,
        checkpoint: Path | None,
        vocab_size: int,
        *,
        can_mask: bool,
    ) -> None:
        """``can_mask``: the engine can. `ConfigurationError` if llguidance is asked for in vain."""
        self.end_id = -1
        self.more_end_ids: tuple[int, ...] = ()
        self._compiler: GuideCompiler | None = None
        folder = Path(config.tokenizer_dir) if config.tokenizer_dir else checkpoint
        self._refusal = _refusal(config, folder, can_mask=can_mask)
        if self._refusal and config.backend == "llguidance":
            raise ConfigurationError(f"guided_decoding_backend is llguidance: {self._refusal}")
        if self._refusal or folder is None:
            return
        from inflight_backend.guided.compiler import GuideCompiler  # needs llguidance
        from inflight_backend.text.tokenizer import TextCodec  # needs tokenizers

        codec = TextCodec(folder, checkpoint)
        self.end_id = codec.end_id
        self.more_end_ids = tuple(each for each in codec.more_end_ids if each < vocab_size)
        self._compiler = GuideCompiler(codec.to_json, vocab_size, codec.end_id)
        if config.backend == "llguidance":
            try:
                self._compiler.load_tokenizer()
            except Exception as error:  # the library raises whatever a bad tokenizer makes it raise
                raise ConfigurationError(
                    f"guided_decoding_backend is llguidance: the tokenizer cannot be used: {error}"
                ) from None

    def start(self, guide: Guide, on_compiled: Callable[[], None]) -> PendingGuide:
        """Compile ``guide`` elsewhere and call ``on_compiled`` there when that has ended;
        `UnsupportedRequest` if this server guides nothing."""
        if self._compiler is None:
            raise UnsupportedRequest(
                f"'{TYPE_FIELD}' is not supported by this server: {self._refusal}"
            )
        pending = self._compiler.start(guide)
        pending.on_compiled(on_compiled)
        return pending

    def close(self) -> None:
        """Compile nothing more."""
        if self._compiler is not None:
            self._compiler.close()


def _refusal(config: GuidedDecodingConfig, folder: Path | None, *, can_mask: bool) -> str:
    """Why nothing is guided; empty if it can be."""
    if config.backend == "none":
        return "guided_decoding_backend is none"
    if not can_mask:
        return "its engine takes no token masks"
    if folder is None or find_file(folder, "tokenizer.json") is None:
        return "the checkpoint has no tokenizer.json; set tokenizer_dir"
    if find_spec("llguidance") is None:
        return "llguidance is not installed (in a clone of inflight: pip install '.[server]')"
    return ""
