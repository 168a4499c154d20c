"""Checkpoints by their names on the Hub, through `huggingface_hub`: its cache, token and settings.

Only the files that are read here are fetched: first the small ones, from which an unsupported model
is refused before its weights are fetched, then the weights that they name. All of ``HF_TOKEN``,
``HF_HOME``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` act as they do for others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from inflight_backend.errors import CheckpointError, ConfigurationError, ServingError
from inflight_backend.models.checkpoint_files import INDEX, SINGLE, weight_names
from inflight_server.serve.console import say
from inflight_server.serve.preflight import check_model

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]+?))?(?:[:/]([\w./-]+\.gguf))?", re.ASCII)
_OF_PARTS = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_SMALL_FILES = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "tekken.json",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_PICKLES = (".bin", ".pt", ".pth")


class HubName(NamedTuple):
    """``repository`` is ``ORG/NAME``; ``revision`` a branch, tag or commit, None for the newest;
    ``file`` a GGUF file, of several parts any."""

    repository: str
    revision: str | None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """None for what is no name on the Hub."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(found[1], found[2], found[3])

    def fetch(self, *, has_weights: bool = True) -> Path:
        """The folder of its files in the cache, or the file that is named, after what is missing
        there has been fetched. Without ``has_weights`` the small files are enough, and weights are
        there only if they were before.

        `CheckpointError` for a model that is not there or not supported, `ConfigurationError` where
        the library is missing.
        """
        try:
            import huggingface_hub
            from huggingface_hub.utils.tqdm import disable_progress_bars
        except ImportError:
            raise ConfigurationError(
                f"--model {self}: a name on the Hub needs huggingface_hub, which is not installed "
                "(in a clone of inflight: pip install '.[hub]'); or give a folder"
            ) from None

        if not sys.stderr.isatty():  # a log is no place for bars
            disable_progress_bars()

        def download(revision: str | None, files: Sequence[str]) -> Path:
            with self._refusals():
                found = huggingface_hub.snapshot_download(
                    self.repository,
                    revision=revision,
                    allow_patterns=list(files),
                    local_files_only=huggingface_hub.constants.HF_HUB_OFFLINE,
                )
                return Path(found)

        say(f"looking for {self.repository} on the Hub and in its cache ...", err=True)
        if self.file is not None:
            return self._fetch_file(download)
        folder = download(self.revision, _SMALL_FILES)
        if not (folder / "config.json").exists():
            raise CheckpointError(self._without_safetensors(self._list_files(folder.name)))
        check_model(folder)
        if not has_weights:
            return folder
        weights = weight_names(folder)
        if not all((folder / name).exists() for name in weights):
            # The commit, so that files of two are never mixed.
            folder = download(folder.name, (*_SMALL_FILES, *weights))
        if not all((folder / name).exists() for name in weights):
            raise CheckpointError(self._without_safetensors(self._list_files(folder.name)))
        say(f"{self.repository}, commit {folder.name}", err=True)
        return folder

    def _fetch_file(self, download: Callable[[str | None, Sequence[str]], Path]) -> Path:
        """The GGUF file that is named, with its other parts."""
        assert self.file is not None
        match = _OF_PARTS.fullmatch(self.file)
        pattern = self.file if match is None else f"{match[1]}-*-of-{match[2]}.gguf"
        folder = download(self.revision, (pattern,))
        if not (folder / self.file).exists():
            found = [each for each in self._list_files(folder.name) if each.endswith(".gguf")]
            raise CheckpointError(
                f"--model {self}: it has no such file; its GGUF files are "
                f"{', '.join(found) or 'none'}"
            )
        say(f"{self.repository}, commit {folder.name}", err=True)
        name = self.file if match is None else f"{match[1]}-00001-of-{match[2]}.gguf"
        return folder / name

    def _list_files(self, revision: str) -> list[str]:
        from huggingface_hub import HfApi

        with self._refusals():
            return list(HfApi().list_repo_files(self.repository, revision=revision))

    def fetch_adapter(self) -> Path:
        """The folder of an adapter, as PEFT saves it."""
        try:
            import huggingface_hub
        except ImportError:
            raise ConfigurationError(
                f"--lora {self}: a name on the Hub needs huggingface_hub, which is not installed "
                "(in a clone of inflight: pip install '.[hub]'); or give a folder"
            ) from None
        with self._refusals("--lora"):
            return Path(
                huggingface_hub.snapshot_download(
                    self.repository,
                    revision=self.revision,
                    allow_patterns=["adapter_config.json", "adapter_model.safetensors"],
                    local_files_only=huggingface_hub.constants.HF_HUB_OFFLINE,
                )
            )

    @contextmanager
    def _refusals(self, option: str = "--model") -> Iterator[None]:
        """What the library raises, in one line with the way out."""
        import httpx
        from huggingface_hub import constants, errors

        where, page = constants.ENDPOINT, f"{constants.ENDPOINT}/{self.repository}"
        words: tuple[tuple[type[Exception], Callable[[Exception], str]], ...] = (
            (
                errors.GatedRepoError,
                lambda _: (
                    f"it is gated: accept its licence at {page}, then set HF_TOKEN or run "
                    "`hf auth login`"
                ),
            ),
            (
                errors.RepositoryNotFoundError,
                lambda _: (
                    f"{where} has no model of this name, or hides it: correct the name, set "
                    "HF_TOKEN, or give a folder that is there"
                ),
            ),
            (errors.RevisionNotFoundError, lambda _: f"it has no revision {self.revision!r}"),
            (
                errors.IncompleteSnapshotError,
                lambda _: (
                    "it is half downloaded, and the Hub cannot be reached"
                    f"{_offline()}: run this again where it can, which continues the download"
                ),
            ),
            (
                errors.LocalEntryNotFoundError,
                lambda _: (
                    f"it is not in the cache {constants.HF_HUB_CACHE}, and {where} cannot be "
                    f"reached{_offline()}: give a folder, or run this where it can"
                ),
            ),
            (errors.OfflineModeIsEnabled, lambda _: f"it is not in the cache whole{_offline()}"),
            (errors.HfHubHTTPError, lambda error: str(error).partition("\n")[0]),
            (
                httpx.HTTPError,
                lambda error: (
                    f"the connection to {where} failed ({error}): run this again, which "
                    "continues the download"
                ),
            ),
            (errors.HFValidationError, lambda error: str(error).partition("\n")[0]),
        )
        try:
            yield
        except ServingError:
            raise
        except Exception as error:
            for kind, say_why in words:
                if isinstance(error, kind):
                    raise CheckpointError(f"{option} {self}: {say_why(error)}") from None
            raise

    def _without_safetensors(self, names: Sequence[str]) -> str:
        pickle = next((name for name in names if name.endswith(_PICKLES)), None)
        if pickle is not None:
            return (
                f"--model {self}: its weights are in {pickle}; only safetensors are read, a pickle "
                "could run code. Some have a revision with safetensors (--model NAME@refs/pr/1), "
                f"else convert it (transformers: save_pretrained writes {SINGLE})"
            )
        if files := [name for name in names if name.endswith(".gguf")]:
            return (
                f"--model {self}: it has GGUF files: name one, such as {self}:{files[0]}; there "
                f"are {', '.join(files)}"
            )
        return f"--model {self}: it has neither {SINGLE} nor {INDEX}"

    def __str__(self) -> str:
        text = self.repository + (f"@{self.revision}" if self.revision else "")
        return text + (f":{self.file}" if self.file else "")


def _offline() -> str:
    from huggingface_hub import constants

    return " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
