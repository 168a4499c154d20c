"""Checks before a server starts; each failure is one clear line."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from importlib import metadata
from ipaddress import IPv6Address
from pathlib import Path

from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.models.checkpoint_files import (
    JsonReader,
    find_config,
    find_file,
    weight_files,
)
from inflight_backend.models.families.registry import FAMILIES, read_model
from inflight_backend.text.generation_config import read_default_sampling
from inflight_backend.text.tokenizer_files import (
    TOKENIZER_CONFIG,
    find_tokenizer,
    no_tokenizer,
    read_json,
)
from inflight_backend.triton.model import check_numpy
from inflight_server.serve.settings import PATH_KEYS, ServeSettings
from inflight_server.serve.tritonserver import TritonInstall

_LOADER_FAILED = 127
_STUB_SECONDS = 20
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+@%=:,~^-]+")


def check_settings(settings: ServeSettings) -> None:
    """`ConfigurationError` unless checkpoint, tokenizer folder, host and ports can be served."""
    check_paths(settings)
    check_checkpoint(settings.model)
    if settings.draft_model is not None:
        check_checkpoint(settings.draft_model)
        check_draft(settings.model, settings.draft_model)
    read_default_sampling(
        settings.model,
        reads_checkpoint=settings.llm_parameters.generation_config == "auto",
        overrides=settings.llm_parameters.default_sampling,
    )
    if "tokenizer_dir" in settings.parameters and not has_tokenizer(settings):
        raise ConfigurationError(f"tokenizer_dir: {no_tokenizer(settings.tokenizer_dir)}")
    check_ports(settings.host, settings.all_ports)


def check_paths(settings: ServeSettings) -> None:
    """`ConfigurationError` for a folder or file that Triton or the Python in it cannot open.

    That Python takes every path for ASCII, whatever the locale says, and would find nothing there.
    Triton starts it by a shell with paths below TMPDIR as they are, and waits for it for ever.
    """
    paths = {"--model": str(settings.model)}
    if settings.draft_model is not None:
        paths["--draft-model"] = str(settings.draft_model)
    paths |= {name: settings.parameters.get(name, "") for name in PATH_KEYS}
    modules = settings.llm_parameters.lora_modules or ""
    if modules.lstrip().startswith("{"):
        paths |= {f"--lora {name}": str(path) for name, path in json.loads(modules).items()}
    for name, path in paths.items():
        if not path.isascii():
            raise ConfigurationError(
                f"{name} {path}: tritonserver opens only paths of ASCII characters; make a link to "
                "it that has such a path, and give that"
            )
    folder = tempfile.gettempdir()
    if not _PLAIN_PATH.fullmatch(folder):
        raise ConfigurationError(
            f"temporary files are in {folder!r}, from where tritonserver cannot start a model: set "
            "TMPDIR to a path of ASCII letters, digits and ._/-"
        )


def check_install(install: TritonInstall, environment: Mapping[str, str]) -> None:
    """`ConfigurationError` unless the server can run our Python."""
    check_numpy(metadata.version("numpy"), install.stub)
    check_stub_starts(install.stub, environment)


def check_checkpoint(model: Path) -> None:
    """`CheckpointError` unless ``model`` is a checkpoint folder or GGUF file of a kind we serve."""
    check_model(model)
    weight_files(model)


def check_draft(model: Path, draft_model: Path) -> None:
    """`ConfigurationError` for an encoder in either: drafts are of the text that a decoder goes on
    with, which is not the prompt there."""
    for option, folder in (("--model", model), ("--draft-model", draft_model)):
        if read_model(folder).encoder is not None:
            raise ConfigurationError(
                f"{option} {folder} has an encoder: a draft model is for a model without one, and "
                "has none itself; leave --draft-model out"
            )


def check_model(folder: Path) -> None:
    """`CheckpointError` unless ``folder`` (its config.json, or a GGUF file) is of a model we
    serve."""
    try:
        read_model(folder)
    except CheckpointError as error:
        if _brings_code(folder):
            words = "code that a checkpoint brings (trust_remote_code) is never run"
            raise CheckpointError(f"{error}; {words}") from None
        raise


def _brings_code(folder: Path) -> bool:
    """True for a model that only its own code knows."""
    with suppress(CheckpointError):
        reader = JsonReader.from_file(find_config(folder))
        return "auto_map" in reader and FAMILIES.keys().isdisjoint(reader.texts("architectures"))
    return False


def has_tokenizer(settings: ServeSettings) -> bool:
    """True when text can be served; without a tokenizer only token ids can."""
    return find_tokenizer(settings.tokenizer_dir) is not None


def has_chat_template(settings: ServeSettings) -> bool:
    """True if messages can be served, as far as the files tell."""
    if settings.front.chat_template is not None:
        return True
    folder = settings.tokenizer_dir
    with suppress(CheckpointError):
        is_a_file = any(find_file(folder, name) for name in _TEMPLATES)
        return is_a_file or bool(read_json(folder, TOKENIZER_CONFIG).get("chat_template"))
    return False


def address_of(host: str) -> str:
    """The address that ``host`` stands for, or `ConfigurationError`.

    Triton does not look names up: its HTTP would listen on 255.255.255.255, which is not reachable.
    """
    if ":" in host:
        try:
            address = IPv6Address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            raise ConfigurationError(f"--host {host}: no such address") from None
        if address.scope_id is not None:
            raise ConfigurationError(f"--host {host}: Triton reads no addresses with a zone (%)")
        return str(address)
    if not host:
        raise ConfigurationError("--host is empty: give an address, 0.0.0.0 for all there are")
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):  # as a name that is too long
        raise ConfigurationError(f"--host {host}: no such address") from None


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """`ConfigurationError` unless every port is free on ``host`` and no two are the same."""
    taken: dict[int, str] = {}
    for option, port in ports.items():
        if port in taken:
            raise ConfigurationError(f"{taken[port]} and {option} are both {port}: choose another")
        taken[port] = option
        _check_port(host, option, port)


def _check_port(host: str, option: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            # Connections of a server that just ended linger on the port without keeping it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigurationError(
            f"{option} {port} cannot be used on {host} ({error.strerror}): "
            f"stop what uses it or choose another port"
        ) from None


def check_stub_starts(stub: Path, environment: Mapping[str, str]) -> None:
    """`ConfigurationError` if the stub lacks a library: the server would hang in loading.

    Started without arguments the stub complains and ends at once.
    """
    try:
        result = subprocess.run(
            [str(stub)],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_STUB_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"the Python stub of tritonserver cannot start: {error}") from None
    if result.returncode == _LOADER_FAILED:
        reason = result.stderr.strip().splitlines()[-1:]
        raise ConfigurationError(f"the Python stub of tritonserver cannot start: {''.join(reason)}")
