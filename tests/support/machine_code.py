"""Reads machine code: for one fault of Hopper's assembler, and for the length of loops.

A matrix product of a warp group runs while the instructions behind it are issued, and may take its
first factor from registers: then these must keep their numbers until the product has been waited
for. The assembler of CUDA 12.8 and 12.9, which Triton 3.6 and 3.7 bring for Hopper, does not always
see to that (triton-lang/triton pull request 11781; CUDA 13.3 does). What it made of a kernel can be
read, and no GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton

_NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_GUARD = re.compile(r"^@!?U?P\w+\s+")
_PRODUCT = re.compile(r"^\w*GMMA\.64x(\d+)x\d+\.(\w+)\S*\s+R\d+, R(\d+)")
_JUMP = re.compile(r"\bBRA\b.*(\.L_\w+)")
_WAIT = re.compile(r"^WARPGROUP\.DEPBAR\.LE gsb0, 0x0")
# Behind a predicate that is written, too (SHFL, LOP3); of a comparison another predicate is next.
_TARGET = re.compile(r"^(\S+)\s+(?:P[0-6T],\s*)?R(\d+)\b")
# Their first register is an address or a number that they read.
_WRITES_NONE = {"ST", "STG", "STS", "STL", "STSM", "RED", "LDGSTS", "BAR", "BRA", "EXIT", "FCHK"}
_NUM_INPUTS = 4  # registers of 64 x 16 numbers of 16 bits, in each thread


@dataclass(frozen=True)
class Code:
    """Instructions in order, without addresses, and where each label stands among them."""

    instructions: list[str]
    labels: dict[str, int]


def disassemble(cubin: Path) -> Code:
    """The code of all kernels of a file."""
    done = subprocess.run([_NVDISASM, "-c", cubin], check=True, capture_output=True, text=True)
    return parse(done.stdout)


def parse(text: str) -> Code:
    """What nvdisasm prints."""
    code = Code([], {})
    for line in text.splitlines():
        if found := _LABEL.match(line):
            code.labels[found[1]] = len(code.instructions)
        elif found := _INSTRUCTION.match(line):
            code.instructions.append(found[1])
    return code


def overwritten_inputs(code: Code) -> tuple[int, list[str]]:
    """How many products take a factor from registers; and for each of them whose registers are
    written before it is waited for: the product, and the instruction that writes."""
    num_products, faults = 0, []
    for number, instruction in enumerate(code.instructions):
        if product := _PRODUCT.match(_GUARD.sub("", instruction)):
            num_products += 1
            first = int(product[3])
            inputs = set(range(first, first + _NUM_INPUTS))
            if writer := _first_writer(code, number + 1, inputs):
                faults.append(f"{instruction}  <-  {writer}")
    return num_products, faults


def loop_lengths(code: Code) -> list[int]:
    """Instructions of each loop with four global loads and no shuffle, from the target of a
    backward branch to the branch: such are the draw's, which go over a row of logits in search of a
    threshold."""
    lengths = []
    for number, instruction in enumerate(code.instructions):
        jump = _JUMP.search(instruction)
        if jump and (first := code.labels[jump[1]]) <= number:
            body = code.instructions[first : number + 1]
            names = [re.split(r"[ .]", _GUARD.sub("", each))[0] for each in body]
            if names.count("LDG") == 4 and "SHFL" not in names:
                lengths.append(len(body))
    return lengths


def _first_writer(code: Code, start: int, inputs: set[int]) -> str | None:
    """The first instruction, on any way from ``start`` to the wait, that writes one of them."""
    seen: set[int] = set()
    begins = [start]
    while begins:
        number = begins.pop()
        while number < len(code.instructions) and number not in seen:
            seen.add(number)
            instruction = code.instructions[number]
            is_guarded = instruction.startswith("@")
            bare = _GUARD.sub("", instruction)
            if _WAIT.match(bare) or (bare.startswith("EXIT") and not is_guarded):
                break
            if inputs & _written(bare):
                return instruction
            if jump := _JUMP.search(bare):
                begins.append(code.labels[jump[1]])
                if not is_guarded:
                    break
            number += 1
    return None


def _written(bare: str) -> set[int]:
    """Registers that an instruction writes."""
    found = _TARGET.match(bare)
    if found is None:
        return set()
    name, *modifiers = found[1].split(".")
    if name in _WRITES_NONE:
        return set()
    count = 1
    if size := re.match(r"\w*GMMA\.64x(\d+)x\d+\.(\w+)", found[1]):
        count = int(size[1]) // (2 if size[2] == "F32" else 4)
    elif name == "LDSM":
        count = next((int(each) for each in modifiers if each in ("2", "4")), 1)
    elif name == "HMMA" or "128" in modifiers:
        count = 4
    elif "64" in modifiers or "WIDE" in modifiers:
        count = 2
    return set(range(int(found[2]), int(found[2]) + count))
