"""How many faults in the product do the tests notice?

    python tools/mutation.py now.json scheduler/inflight_scheduler --tests tests/scheduler
    python tools/mutation.py before.json scheduler/inflight_scheduler --tests ../old/tests/scheduler

Takes ``--count`` random faults (a comparison turned, a number off by one, ``and`` for ``or``; the
same for the same ``--seed``), puts each alone into a copy of the packages, and runs the tests that
reach its line, the most specific first. A fault is *killed* if one of them fails. ``--tests`` may
belong to another checkout, so two suites are compared on one product.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("scheduler", "kernels", "client", "backend")
MAX_TESTS = 60
"""Run for one fault; the most specific ones come first."""

_TURNED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """``number``: of the faults that `faults_of` finds in ``file``."""

    file: Path
    line: int
    kind: str
    number: int


def faults_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Change ``tree`` in one place after another: yields line and kind while it is changed."""
    for parent in [each for each in ast.walk(tree) if _is_in_function(each)]:
        for place, node in _children(parent):
            for kind, other in _others(node):
                _put(parent, place, other)
                yield getattr(node, "lineno", getattr(parent, "lineno", 0)), kind
                _put(parent, place, node)


def _is_in_function(node: ast.AST) -> bool:
    return getattr(node, "is_in_function", False)


def _mark(node: ast.AST, is_in_function: bool = False) -> ast.AST:
    """Say of each node whether it belongs to the body of a function."""
    node.is_in_function = is_in_function  # type: ignore[attr-defined]
    for field, value in ast.iter_fields(node):
        is_body = field == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_code = field not in ("annotation", "returns", "decorator_list", "args", "msg")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                _mark(child, is_code and (is_body or is_in_function))
    return node


def _children(parent: ast.AST) -> Iterator[tuple[tuple[str, int | None], ast.AST]]:
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list", "args", "msg", "ctx"):
            continue
        if isinstance(value, list):
            yield from (((field, i), each) for i, each in enumerate(value) if _is_node(each))
        elif _is_node(value):
            yield (field, None), value


def _is_node(value: object) -> bool:
    return isinstance(value, ast.AST)


def _put(parent: ast.AST, place: tuple[str, int | None], node: ast.AST) -> None:
    field, index = place
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _others(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in place of ``node``, with a name for it."""
    if type(node) in _TURNED:
        turned = _TURNED[type(node)]
        yield f"{type(node).__name__} -> {turned.__name__}", turned()
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "flag", ast.copy_location(ast.Constant(not node.value), node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "off by one", ast.copy_location(ast.Constant(node.value + 1), node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "without not", node.operand
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return None", ast.copy_location(ast.Return(ast.Constant(None)), node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield "left out", ast.copy_location(ast.Pass(), node)
    elif isinstance(node, ast.Assign | ast.AugAssign) and not isinstance(node, ast.AnnAssign):
        if isinstance(node, ast.AugAssign) or isinstance(node.targets[0], ast.Attribute):
            yield "left out", ast.copy_location(ast.Pass(), node)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        other = copy.copy(node)
        other.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        yield "condition turned", other


def choose(sources: list[Path], count: int, seed: int) -> list[Fault]:
    """``count`` faults of all that there are."""
    found = []
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            tree = _parse(ROOT / file)
            found += [Fault(file, *each, i) for i, each in enumerate(faults_of(tree))]
    return random.Random(seed).sample(found, min(count, len(found)))


def _parse(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    _mark(tree)
    return tree


def faulty_source(fault: Fault) -> str:
    """The text of the file with ``fault``."""
    tree = _parse(ROOT / fault.file)
    for number, _ in enumerate(faults_of(tree)):
        if number == fault.number:
            return ast.unparse(ast.fix_missing_locations(tree))
    raise ValueError(f"there is no {fault}")


def run_tests(
    tests_root: Path, names: list[str], packages: Path, seconds: float, *options: str
) -> int:
    """The status of pytest in ``tests_root`` with the packages of the folder ``packages``."""
    path = os.pathsep.join(str(packages / name) for name in PACKAGES)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Not the packages of the tests' own checkout.
    command += ["-o", "pythonpath=tests tools benchmarks", *options, *names]
    try:
        return subprocess.run(
            command,
            cwd=tests_root,
            env=environment,
            timeout=seconds,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).returncode
    except subprocess.TimeoutExpired:
        return -1


def reach(data_file: Path) -> dict[tuple[str, int], list[str]]:
    """(file, line) -> tests that run it, the most specific first, by coverage's contexts."""
    from coverage import CoverageData

    data = CoverageData(str(data_file))
    data.read()
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for file in data.measured_files():
        parts = Path(file).parts
        start = max((i for i, part in enumerate(parts) if part in PACKAGES), default=0)
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = {each.partition("|")[0] for each in contexts if each}
            found["/".join(parts[start:]), line] |= tests
    size = Counter(test for tests in found.values() for test in tests)
    return {key: sorted(tests, key=lambda test: size[test]) for key, tests in found.items()}


def judge(fault: Fault, tests: list[str], tests_root: Path, copies: Queue[Path]) -> str:
    """``killed``, ``survived`` or ``not reached``."""
    if not tests:
        return "not reached"
    packages = copies.get()
    try:
        file = packages / fault.file
        file.write_text(faulty_source(fault), encoding="utf-8")
        status = run_tests(tests_root, tests[:MAX_TESTS], packages, 300, "-x", "--timeout=60")
        shutil.copyfile(ROOT / fault.file, file)
        return "survived" if status in (0, 5) else "killed"
    finally:
        copies.put(packages)


def main() -> None:
    """Write the JSON and print the share of killed faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("sources", nargs="+", type=Path, help="files or folders below the root")
    parser.add_argument("--tests", nargs="+", type=Path, required=True)
    parser.add_argument("--marker", default="not gpu", help="pytest -m for the first run")
    parser.add_argument("--coverage", type=Path, help="of a first run that is there already")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    tests_root = next(
        each for each in given.tests[0].resolve().parents if (each / "pyproject.toml").exists()
    )
    faults = choose(given.sources, given.count, given.seed)
    with tempfile.TemporaryDirectory() as scratch:
        copies: Queue[Path] = Queue()
        for number in range(given.processes):
            for name in PACKAGES:
                shutil.copytree(ROOT / name, Path(scratch, str(number), name))
            copies.put(Path(scratch, str(number)))
        data_file = given.coverage
        if data_file is None:
            data_file = Path(scratch, "coverage")
            os.environ["COVERAGE_FILE"] = str(data_file)
            names = [str(each.resolve()) for each in given.tests]
            coverage = ["--cov", "--cov-context=test", "--cov-report=", "-m", given.marker]
            sources = [f"--cov={ROOT / each}" for each in PACKAGES]
            run_tests(tests_root, names, ROOT, 3600, *coverage, *sources)
        lines = reach(data_file)
        with ThreadPoolExecutor(given.processes) as pool:
            verdicts = list(
                pool.map(
                    lambda each: judge(
                        each, lines.get((str(each.file), each.line), []), tests_root, copies
                    ),
                    faults,
                )
            )
    rows: list[dict[str, Any]] = [
        {"file": str(fault.file), "line": fault.line, "kind": fault.kind, "verdict": verdict}
        for fault, verdict in zip(faults, verdicts, strict=True)
    ]
    counts = Counter(verdicts)
    given.output.write_text(
        json.dumps({"counts": counts, "seed": given.seed, "faults": rows}, indent=1) + "\n"
    )
    print(f"{counts['killed']} of {len(rows)} killed: {dict(counts)}")


if __name__ == "__main__":
    main()
