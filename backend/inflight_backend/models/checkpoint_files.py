"""The files of a checkpoint folder, read without torch: for the loader and ``inflight plan``.

What people give instead of a folder (a name on the Hub, its cache, a single file) is an error that
says what to give. JSON values are read through `JsonReader`, whose errors name file and key.

Links: a file may be a link inside the folder, and, as hub caches lay out a snapshot
(``models--*/snapshots/<revision>``), a link into the ``blobs`` folder beside ``snapshots``. Any
other link that leaves the folder is refused, so a checkpoint cannot make the server read foreign
files, nor tell clients what is in them.

Weights are safetensors, never a pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError, safe_open

from inflight_backend.errors import CheckpointError
from inflight_backend.gguf_files import BLOCKS, SUFFIX, find_gguf, open_gguf, plain_name

_MAX_BYTES = 64 * 2**20  # the index of a very large checkpoint has some 10 MB
REQUIRED: Any = object()
"""The default of a key without one."""


class JsonReader:
    """One JSON object; ``null`` counts as absent, and a missing required key is an error."""

    def __init__(
        self, values: dict[str, Any], where: str, names: Mapping[str, str] | None = None
    ) -> None:
        """``names``: what the file calls keys that are asked for by other names."""
        self._values = values
        self._where = where
        self._names = names or {}
        self._asked: set[str] | None = None  # keys of the file, of a watched one

    def watched(self) -> JsonReader:
        """The same object, noting the keys that it, or one made of it, is asked for."""
        return self._like(self._values, self._names, set())

    def unread(self) -> list[str]:
        """Keys of a watched object that nobody has asked for."""
        asked = self._asked or ()
        return [key for key in self if key not in asked]

    def with_names(self, **names: str) -> JsonReader:
        """The same object, where ``key="name"`` says what the file calls a key."""
        return self._like(self._values, {**self._names, **names}, self._asked)

    def with_values(self, **values: object) -> JsonReader:
        """The same object with these keys, by the names that they are asked for."""
        names = {key: name for key, name in self._names.items() if key not in values}
        return self._like({**self._values, **values}, names, self._asked)

    def _like(
        self, values: dict[str, Any], names: Mapping[str, str], asked: set[str] | None
    ) -> JsonReader:
        reader = type(self)(values, self._where, names)
        reader._asked = asked
        return reader

    def with_defaults(self, **values: object) -> JsonReader:
        """The same object with those of ``values`` whose keys it lacks; None: with none."""
        given = {key: each for key, each in values.items() if each is not None and key not in self}
        return self.with_values(**given)

    def value(self, key: str) -> object:
        """Whatever is there; None if nothing is."""
        name = self._names.get(key, key)
        if self._asked is not None:
            self._asked.add(name)
        return self._values.get(name)

    def is_list(self, key: str) -> bool:
        """True if the value is a list."""
        return isinstance(self.value(key), list)

    def first_of(self, *keys: str) -> str:
        """The first of ``keys`` that the file has; the first one if it has none."""
        return next((key for key in keys if key in self), keys[0])

    @classmethod
    def from_file(cls, path: Path) -> JsonReader:
        """Read a file; `CheckpointError` if it is no JSON object or holds NaN or Infinity."""
        name = path.name
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise CheckpointError(f"{name}: larger than {_MAX_BYTES} bytes")
            values = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
        except OSError as error:
            raise CheckpointError(f"{name}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            why = "a pointer of Git LFS; run git lfs pull" if is_lfs_pointer(path) else error
            raise CheckpointError(f"{name}: not valid JSON ({why})") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{name}: must hold a JSON object")
        return cls(values, name)

    def __contains__(self, key: str) -> bool:
        return self.value(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (key for key, value in self._values.items() if value is not None)

    def equals(self, other: JsonReader) -> bool:
        """True if both objects hold the same."""
        return self._values == other._values

    def is_null(self, key: str) -> bool:
        """True when the key is written as ``null``."""
        return key in self._values and self._values[key] is None

    def fail(self, key: str, complaint: str) -> NoReturn:
        """Raise `CheckpointError` about ``key``."""
        raise CheckpointError(f"{self._where}: {self._names.get(key, key)} {complaint}")

    def integer(
        self, key: str, *, default: int = REQUIRED, minimum: int = 1, maximum: int = 2**24
    ) -> int:
        """An integer between the bounds."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"must be an integer, not {_show(value)}")
        if key in self and not minimum <= value <= maximum:
            self.fail(key, f"must be between {minimum} and {maximum}, not {_show(value)}")
        return value

    def number(self, key: str, *, default: float = REQUIRED) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(key, f"must be a number, not {_show(value)}")
        if not (math.isfinite(value) and 0 < value <= 1e30):
            self.fail(key, f"must be finite and above 0, not {_show(value)}")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {_show(value)}")
        return value

    def text(self, key: str, *, default: str = REQUIRED) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self.fail(key, f"must be a string, not {_show(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; an absent one is empty."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(key, f"must be a list of strings, not {_show(value)}")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers; an absent one is empty."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(item) in (int, bool) for item in value):
            self.fail(key, f"must be a list of integers, not {_show(value)}")
        return [int(item) for item in value]

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers above 0; an absent one is empty."""
        value = self._get(key, [])
        if not isinstance(value, list):
            self.fail(key, f"must be a list of numbers, not {_show(value)}")
        return [JsonReader({key: item}, self._where).number(key) for item in value]

    def section(self, key: str) -> JsonReader:
        """A nested object; an absent one is empty."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            self.fail(key, f"must be an object, not {_show(value)}")
        return type(self)(value, f"{self._where}: {key}")

    def sections(self, key: str) -> list[JsonReader]:
        """A list of nested objects; an absent one is empty."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.fail(key, f"must be a list of objects, not {_show(value)}")
        return [JsonReader(item, f"{self._where}: {key}") for item in value]

    def _get(self, key: str, default: Any) -> Any:
        value = self.value(key)
        if value is not None:
            return value
        if default is REQUIRED:
            self.fail(key, "is missing")
        return default


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_DOWNLOAD = "hf download NAME --local-dir FOLDER"
_OF_MODEL = "models--"
_LFS_POINTER = b"version https://git-lfs"


def find_file(folder: Path, name: str) -> Path | None:
    """The path of the file ``name`` in ``folder``; None if it has no such file.

    `CheckpointError` for a link that leaves the folder or leads nowhere.
    """
    path = folder / name
    if not path.is_symlink() and not path.is_file():
        return None
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # nothing there, or a circle
        raise CheckpointError(f"{name}: no such file{_hint_of_link(path)}") from None
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in allowed):
        raise CheckpointError(f"{name}: is a link that leaves the checkpoint folder")
    return path if target.is_file() else None


def checkpoint_name(folder: Path) -> str:
    """What people call the checkpoint in ``folder``: a snapshot in the Hub's cache has a commit for
    its name."""
    home = folder.parent.parent
    if folder.parent.name == "snapshots" and home.name.startswith(_OF_MODEL):
        return home.name.removeprefix(_OF_MODEL).replace("--", "/")
    return plain_name(folder)


def is_lfs_pointer(path: Path) -> bool:
    """True for what a clone without Git LFS has in the place of a large file."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    return False


def find_config(folder: Path) -> Path:
    """The path of config.json; `CheckpointError` says what to give if ``folder`` has none."""
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file and no {SUFFIX}; give the checkpoint folder it is in"
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"the model folder {folder} does not exist; `inflight serve` fetches ORG/NAME from the "
            f"Hub, and so does {_DOWNLOAD}"
        )
    path = find_file(folder, "config.json")
    if path is None:
        raise CheckpointError(f"{folder} has no config.json: {_hint_of_folder(folder)}")
    return path


def _hint_of_folder(folder: Path) -> str:
    snapshot = next(folder.glob("snapshots/*/config.json"), None)
    if snapshot is not None:
        return f"give {snapshot.parent}"
    if (folder / "adapter_config.json").is_file():
        return "it is an adapter (LoRA); give its base model, and this with --lora NAME=FOLDER"
    return "it is not a Hugging Face checkpoint"


def _hint_of_link(path: Path) -> str:
    """A snapshot of the Hub's cache that was copied or mounted by itself is links to nothing."""
    if not path.is_symlink() or "blobs" not in path.readlink().parts:
        return ""
    return f" behind this link into the Hub's cache; give a folder with the files: {_DOWNLOAD}"


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHOWN_NAMES = 3
_UNFINISHED = ".cache/huggingface/download"  # where `hf download` has what it has begun
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OF_TRAINING = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def weight_files(folder: Path) -> dict[str, set[str] | None]:
    """Weight file -> the tensors the index promises in it, None where there is no index.

    Of a GGUF file that is its first part. `CheckpointError` says what the folder holds instead, and
    the way out.
    """
    if (gguf := find_gguf(folder)) is not None:
        return {gguf.name: None}
    _refuse_adapter(folder)
    if (path := find_file(folder, INDEX)) is not None:
        files = _read_index(path)
        missing = [name for name in files if find_file(folder, name) is None]
        if missing:
            raise CheckpointError(
                f"{list_names(missing)}: no such file, but {INDEX} names it: the folder is half "
                f"downloaded or copied; the same again continues ({_DOWNLOAD})"
            )
        if SINGLE not in files and find_file(folder, SINGLE) is not None:
            raise CheckpointError(
                f"{SINGLE}: is beside {INDEX}, which names other files (transformers reads the "
                "first, vLLM the others); remove the one that is old"
            )
        return dict(sorted(files.items()))
    if find_file(folder, SINGLE) is not None:
        return {SINGLE: None}
    raise CheckpointError(_what_else(folder))


def weight_names(folder: Path) -> list[str]:
    """The weight files that ``folder`` ought to have, whether they are there or not."""
    path = find_file(folder, INDEX)
    return [SINGLE] if path is None else list(_read_index(path))


def has_weights(folder: Path) -> bool:
    """False if a weight file of a checkpoint folder is not there."""
    return folder.is_file() or all((folder / name).exists() for name in weight_names(folder))


def _read_index(path: Path) -> dict[str, set[str] | None]:
    index = JsonReader.from_file(path).section("weight_map")
    files: dict[str, set[str] | None] = {}
    for tensor in index:
        file = index.text(tensor)
        if Path(file).name != file or not file.endswith(".safetensors"):
            index.fail(tensor, f"must name a .safetensors file of the folder, not {file!r}")
        promised = files.setdefault(file, set())
        assert promised is not None
        promised.add(tensor)
    if not files:
        raise CheckpointError(f"{INDEX}: weight_map is empty")
    return files


def list_names(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def _refuse_adapter(folder: Path) -> None:
    """Where the model's own weights are too, transformers adds the adapter to them."""
    for name in _ADAPTERS:
        if (folder / "adapter_config.json").is_file() and (folder / name).is_file():
            raise CheckpointError(
                f"{name}: an adapter (LoRA) beside its model is not supported; take it and "
                "adapter_config.json out of the folder, and give theirs with --lora NAME=FOLDER"
            )


def _what_else(folder: Path) -> str:
    pickles = [name for name in _names(folder, *_PICKLES) if not name.startswith(_OF_TRAINING)]
    if pickles:
        return (
            f"{pickles[0]}: only safetensors are read, a pickle could run code; convert it "
            f"(transformers: save_pretrained writes {SINGLE})"
        )
    if _names(folder, f"{_UNFINISHED}/*.incomplete"):
        return f"{folder}: its download was not finished; the same again continues ({_DOWNLOAD})"
    found = ", ".join(_names(folder, "*.safetensors")[:2])
    rest = f", only {found}" if found else "; was it downloaded as a whole?"
    return f"{folder}: no {SINGLE} and no {INDEX}{rest}"


def _names(folder: Path, *patterns: str) -> list[str]:
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


_DTYPE_TO_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Type (by its name in safetensors) and shape of a tensor, and the file it is in."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        if self.dtype in BLOCKS:
            count, size = BLOCKS[self.dtype]
            return prod(self.shape) // count * size
        return prod(self.shape) * _DTYPE_TO_BYTES.get(self.dtype, 1)


@contextmanager
def open_weights(
    folder: Path, framework: str = "numpy"
) -> Iterator[tuple[dict[str, Any], dict[str, TensorHeader]]]:
    """The open weight files in ``folder`` by name, and the header of every tensor by its name.

    ``framework`` is whose tensors the files give ("numpy", "pt"); a `GgufFile` gives bytes, and
    tensors of three dimensions are listed as the rows of all their matrices. `CheckpointError`
    names the file that is missing, damaged, cut off or not what the index says.
    """
    files: dict[str, Any] = {}
    headers: dict[str, TensorHeader] = {}
    if (path := find_gguf(folder)) is not None:
        gguf = open_gguf(path)
        for name, tensor in gguf.tensors.items():
            shape = tensor.shape
            if len(shape) > 2:
                shape = (prod(shape[:-1]), shape[-1])
            headers[name] = TensorHeader(gguf.name, tensor.dtype, shape)
        yield {gguf.name: gguf}, headers
        return
    with ExitStack() as stack:
        for name, promised in weight_files(folder).items():
            files[name] = opened = stack.enter_context(_open_weights(folder, name, framework))
            names = opened.keys()
            if promised is not None and promised != set(names):
                odd = list_names(sorted(promised ^ set(names)))
                raise CheckpointError(f"{name}: does not hold what {INDEX} says ({odd})")
            for tensor in names:
                part = opened.get_slice(tensor)
                headers[tensor] = TensorHeader(name, part.get_dtype(), tuple(part.get_shape()))
        yield files, headers


def read_weight_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of the weight files in ``folder``, by name; errors as of `open_weights`."""
    with open_weights(folder) as (_, headers):
        return headers


def _open_weights(folder: Path, name: str, framework: str) -> Any:
    path = find_file(folder, name)
    if path is None:
        raise CheckpointError(f"{name}: no such file")
    try:
        return safe_open(str(path), framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        why = f"not a whole safetensors file, truncated or damaged ({error})"
        if is_lfs_pointer(path):
            why = "a pointer of Git LFS, not the weights; run git lfs pull"
        raise CheckpointError(f"{name}: {why}") from None


# What tools lay beside or instead of a weight that they quantise (GPTQ and AWQ, ModelOpt and
# compressed-tensors, bitsandbytes, MLX), some without a word of it in config.json.
