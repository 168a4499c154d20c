"""Puts the packages of the peers into one archive that fits a transfer of 64 MiB.

    python benchmarks/pack_peers.py --into .peers            download, trim, pack, check
    mkdir -p /some/site && tar -xJf .peers/peers.tar.xz -C /some/site      on the GPU machine
    python benchmarks/peers.py --site /some/site

Wheels come from the package registry that pip is set up for, at the versions below, for a machine
with Python 3.12, torch 2.11.0 and CUDA 13; nothing is installed and nothing of it is committed
(``.peers`` is ignored by git). Left out of vLLM's wheel: its FlashAttention 2, mixture-of-experts
and Blackwell libraries and its Rust front end, none of which a dense model on Hopper uses. Of its
CUDA libraries the code of other GPUs is blanked (`peer_parts.fatbin`). mini-sglang is in no
registry: a folder ``minisgl`` that you put into the site is used, and without it there is a row
that says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peer_parts.fatbin import blank_other_architectures
from peer_parts.promises import broken_promises

HOPPER = 90
_MAX_ARCHIVE = 56 * 2**20  # of the 64 MiB; the working tree travels as well
_VLLM = "vllm==0.26.0"
_FLASHINFER = ("flashinfer-python==0.6.14", "apache-tvm-ffi==0.1.11", "pyzmq==27.3.0")
# What `from vllm import LLM` imports beyond the packages of the GPU image.
_SMALL = (
    "annotated-types==0.8.0",
    "cachetools==8.0.0",
    "cbor2==6.2.1",
    "distro==1.9.0",
    "fastapi==0.136.3",
    "httpcore2==2.16.2",
    "httpx2==2.16.2",
    "jiter==0.19.0",
    "llguidance==1.7.6",
    "msgspec==0.22.0",
    "openai==3.52.0",
    "openai-harmony==0.0.8",
    "partial-json-parser==0.2.1.1.post7",
    "pybase64==1.5.1",
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "sniffio==1.3.1",
    "starlette==1.10.0",
    "typing-inspection==0.4.5",
    "xgrammar==0.2.8",
)
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
_LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/_moe_C_stable*",
    "vllm/vllm-rs",
    "vllm/_flashmla*",
    "vllm/_qutlass*",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "*/swagger-ui*",
    "*.jpg",
    "*.png",
)


def main() -> None:
    """Download, unpack what is wanted, check it, write the archive."""
    options = _parse()
    wheels, site = options.into / "wheels", options.into / "site"
    _download(wheels)
    for wheel in sorted(wheels.glob("*.whl")):
        _unpack(wheel, site)
    problems = broken_promises(site)
    for problem in problems:
        print(f"NOT AS EXPECTED  {problem}")
    archive = options.into / "peers.tar.xz"
    _pack(site, archive)
    size = archive.stat().st_size
    print(f"{archive}: {size / 2**20:.1f} MiB of at most {_MAX_ARCHIVE / 2**20:.0f}")
    if problems or size > _MAX_ARCHIVE:
        sys.exit(1)


def _download(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    for name in (_VLLM, *_FLASHINFER, *_SMALL):
        subprocess.run([*command, name], check=True)


def _unpack(wheel: Path, site: Path) -> None:
    """A wheel's files as pip would lay them, without those that are not used here."""
    with zipfile.ZipFile(wheel) as opened:
        for member in opened.infolist():
            if member.is_dir() or any(fnmatch(member.filename, name) for name in _LEFT_OUT):
                continue
            target = site / _place(member.filename)
            target.parent.mkdir(parents=True, exist_ok=True)
            data = bytearray(opened.read(member))
            if wheel.name.startswith("vllm-") and target.suffix == ".so":
                found = blank_other_architectures(data, HOPPER)
                if found.blanked:
                    print(f"{target.name}: {found.blanked_bytes / 2**20:.0f} MiB blanked")
            target.write_bytes(data)


def _place(name: str) -> str:
    """``package.data/purelib/x`` is installed as ``x``."""
    parts = name.split("/")
    if parts[0].endswith(".data") and parts[1] in ("purelib", "platlib"):
        return "/".join(parts[2:])
    return name


def _pack(site: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=6) as stream:
        for path in sorted(site.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                stream.add(path, arcname=path.relative_to(site))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path(".peers"), help="folder to work in")
    return parser.parse_args()


if __name__ == "__main__":
    main()
