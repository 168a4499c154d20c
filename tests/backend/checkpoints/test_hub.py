"""`--model ORG/NAME`: what is fetched from the Hub, kept in its cache, or refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support.hub import COMMIT, Hub, serving

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.checkpoint_files import checkpoint_name
from inflight_server.checkpoints import find_checkpoint
from inflight_server.checkpoints.hub import HubName
from inflight_server.serve.settings import DEMO_MODEL

DEMO = {path.name: path.read_bytes() for path in DEMO_MODEL.iterdir() if path.is_file()}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
SHARDED = {
    **{name: data for name, data in DEMO.items() if name != "model.safetensors"},
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    SHARDS[0]: b"v" * 5000,
    SHARDS[1]: b"w" * 5000,
}
ODD = {
    "README.md": b"r",
    "consolidated.safetensors": b"c" * 9999,
    "original/params.json": b"{}",
    "onnx/config.json": b"{}",
    "pytorch_model.bin": b"p",
    "additional_chat_templates/tool_use.jinja": b"t",
}
CONFIG = json.loads(DEMO["config.json"])
NO_WEIGHTS = {name: data for name, data in DEMO.items() if name != "model.safetensors"}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    repositories: dict[str, Mapping[str, bytes]] = {
        "some/demo": {**DEMO, **ODD},
        "some/sharded": SHARDED,
        "some/pickle": {**NO_WEIGHTS, "pytorch_model.bin": b"p"},
        "some/gguf": {"demo-Q4.gguf": b"g", "demo-Q8.gguf": b"h"},
        "some/gguf-with-config": {**NO_WEIGHTS, "demo-Q4.gguf": b"g"},
        "some/nothing": NO_WEIGHTS,
        "some/adapter": {
            "adapter_config.json": b"{}",
            "adapter_model.safetensors": b"a",
            "README.md": b"r",
        },
        "some/other": {
            **DEMO,
            "config.json": json.dumps(
                {**CONFIG, "architectures": ["OddForCausalLM"], "auto_map": {"AutoModel": "m.Odd"}}
            ).encode(),
            "m.py": b"raise SystemExit(99)",
        },
    }
    with serving(Hub(repositories, gated=frozenset({"some/gated"}))) as hub:
        yield hub


@pytest.fixture
def cache(tmp_path: Path, hub: Hub) -> Path:
    hub.fetched.clear()
    hub.cut.clear()
    return tmp_path / "cache"


def fetch(hub: Hub, cache: Path, name: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`inflight model-repository` in a process of its own: the library reads its settings once."""
    models = str(cache.parent / "models")
    return run_command(hub, cache, "model-repository", models, "--force", "--model", name, **more)


def run_command(
    hub: Hub, cache: Path, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """`inflight` likewise."""
    return run_beside(hub, cache, ["-m", "inflight_client.cli", *arguments], **more)


def run_beside(
    hub: Hub, cache: Path, command: list[str], **more: str
) -> subprocess.CompletedProcess[str]:
    """Python with this Hub, and with ``more`` in its environment."""
    proxies = {name for name in os.environ if name.lower().endswith("_proxy")}
    kept = {name: value for name, value in os.environ.items() if name not in proxies}
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, *command],
        env={**kept, **settings, **more},
        capture_output=True,
        text=True,
        check=False,
        cwd=cache.parent,
    )


@pytest.mark.slow
def test_a_plan_fetches_no_weights(hub: Hub, cache: Path) -> None:
    """Of those that are in the cache it reads the headers; offline the cache is enough."""
    command = ("plan", "some/demo", "--json")
    first = run_command(hub, cache, *command)
    assert first.returncode == 0, first.stderr
    assert "model.safetensors" not in hub.fetched
    planned = json.loads(first.stdout)
    assert planned["file_bytes"] is None
    assert "the files are not here" in run_command(hub, cache, *command[:2]).stdout
    assert fetch(hub, cache, "some/demo").returncode == 0
    again = json.loads(run_command(hub, cache, *command, HF_HUB_OFFLINE="1").stdout)
    assert again["file_bytes"] > 0
    again |= {"file_bytes": None, "read_bandwidth": planned["read_bandwidth"]}
    assert again == planned


def snapshot(cache: Path, name: str) -> Path:
    return cache / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT


def test_only_what_is_read_is_fetched_and_only_once(hub: Hub, cache: Path) -> None:
    result = fetch(hub, cache, "some/demo")
    assert result.returncode == 0, result.stderr
    folder = snapshot(cache, "some/demo")
    written = (cache.parent / "models" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert f'"{folder}"' in written
    assert result.stderr.splitlines() == [
        "looking for some/demo on the Hub and in its cache ...",
        f"some/demo, commit {COMMIT}",
    ]
    wanted = {*DEMO, "additional_chat_templates/tool_use.jinja"}
    assert set(hub.fetched) == wanted
    assert hub.fetched[-1] == "model.safetensors"
    hub.fetched.clear()
    assert fetch(hub, cache, "some/demo@main").returncode == 0
    assert fetch(hub, cache, f"some/demo@{COMMIT}").returncode == 0
    offline = fetch(hub, cache, "some/demo", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert hub.fetched == []


@pytest.mark.slow
def test_adapters_are_fetched_once_and_found_offline(hub: Hub, cache: Path) -> None:
    """What ``--lora`` names."""
    find = "from inflight_server.checkpoints import find_adapter as f; print(f('{}'))"

    def fetch_adapter(name: str, **more: str) -> subprocess.CompletedProcess[str]:
        return run_beside(hub, cache, ["-c", find.format(name)], **more)

    result = fetch_adapter("some/adapter")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(snapshot(cache, "some/adapter"))
    assert sorted(hub.fetched) == ["adapter_config.json", "adapter_model.safetensors"]
    hub.fetched.clear()
    offline = fetch_adapter(f"some/adapter@{COMMIT}", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, result.stdout), offline.stderr
    assert hub.fetched == []
    missing = fetch_adapter("some/none", HF_HUB_OFFLINE="1")
    assert "--lora some/none: it is not in the cache" in missing.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_download_that_broke_off_says_so_and_continues(hub: Hub, cache: Path) -> None:
    hub.cut[SHARDS[1]] = 3000
    result = fetch(hub, cache, "some/sharded")
    assert result.returncode == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: --model some/sharded: the connection to {hub.url} failed (")
    assert line.endswith("run this again, which continues the download")
    offline = fetch(hub, cache, "some/sharded", HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert offline.stderr.splitlines()[-1] == (
        "error: --model some/sharded: it is half downloaded, and the Hub cannot be reached "
        "(HF_HUB_OFFLINE is set): run this again where it can, which continues the download"
    )
    folder = snapshot(cache, "some/sharded")
    missing = [name for name in SHARDS if not (folder / name).exists()]  # fetched side by side
    hub.cut.clear()
    hub.fetched.clear()
    assert fetch(hub, cache, "some/sharded").returncode == 0
    assert SHARDS[1] in missing
    assert sorted(hub.fetched) == missing
    assert (folder / SHARDS[1]).read_bytes() == b"w" * 5000


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some/unknown", "{url} has no model of this name, or hides it: correct the name, set HF_"),
        ("some/gated", "it is gated: accept its licence at {url}/some/gated, then set HF_TOKEN or"),
        ("some/demo@old", "some/demo@old: it has no revision 'old'"),
        (
            "some/pickle",
            "its weights are in pytorch_model.bin; only safetensors are read, a ",
        ),
        ("some/gguf", "it has GGUF files: name one, such as some/gguf:demo-Q4.gguf; there are d"),
        ("some/gguf-with-config", "name one, such as some/gguf-with-config:demo-Q4.gguf"),
        (
            "some/gguf:odd.gguf",
            "it has no such file; its GGUF files are demo-Q4.gguf, demo-Q8.gguf",
        ),
        ("some/nothing", "it has neither model.safetensors nor model.safetensors.index.json"),
        ("some/other", "'OddForCausalLM' is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    hub: Hub, cache: Path, name: str, message: str
) -> None:
    result = fetch(hub, cache, name)
    assert result.returncode == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert message.format(url=hub.url) in line
    assert "model.safetensors" not in hub.fetched  # refused before the weights are fetched


def test_a_gguf_file_is_fetched_with_its_other_parts(
    tmp_path: Path,
) -> None:
    parts = [f"Q4/m-0000{number}-of-00002.gguf" for number in (1, 2)]
    folder = tmp_path / "snapshots"

    def download(_: str | None, patterns: Sequence[str]) -> Path:
        for name in (*parts, "Q4/other.gguf", "README.md"):
            if any(fnmatch(name, pattern) for pattern in patterns):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(b"g")
        return folder

    assert HubName("org/name", None, parts[1])._fetch_file(download) == folder / parts[0]
    assert sorted(path.name for path in folder.rglob("*.gguf")) == [
        Path(each).name for each in parts
    ]


@pytest.mark.slow
def test_without_the_hub_and_without_a_cache(hub: Hub, cache: Path) -> None:
    gone = "http://127.0.0.1:9"  # nobody listens there
    for more, why in (({"HF_ENDPOINT": gone}, ""), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE")):
        result = fetch(hub, cache, "some/demo", **more)
        line = result.stderr.splitlines()[-1]
        assert line.startswith("error: --model some/demo: it is not in the cache ")
        assert why in line
        assert "give a folder, or run this where it can" in line


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[hub\]'\); or give a folder"):
        find_checkpoint("some/demo")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None, None)),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1", None)),
        ("org/name:Q4.gguf", ("org/name", None, "Q4.gguf")),
        ("org/name/Q4/m-00001-of-00002.gguf", ("org/name", None, "Q4/m-00001-of-00002.gguf")),
        ("org/name@v1:Q4.gguf", ("org/name", "v1", "Q4.gguf")),
        ("./org/name", None),
        ("/org/name", None),
        ("../name", None),
        ("name", None),
        ("a/b/c", None),
        ("org/name@", None),
    ],
)
def test_what_is_a_name(text: str, expected: tuple[str, str | None, str | None] | None) -> None:
    assert HubName.parse(text) == expected


def test_what_is_there_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert find_checkpoint(None) == DEMO_MODEL
    assert find_checkpoint("org/name") == tmp_path / "org" / "name"
    assert find_checkpoint("nowhere") == tmp_path / "nowhere"
    with pytest.raises(ConfigurationError, match="org/other does not exist in the folder org"):
        find_checkpoint("org/other")


def test_a_snapshot_has_the_name_of_its_repository(tmp_path: Path) -> None:
    assert checkpoint_name(snapshot(tmp_path, "Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"
    assert checkpoint_name(tmp_path / "snapshots" / "Qwen3") == "Qwen3"
