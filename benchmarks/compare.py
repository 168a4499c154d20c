"""Is this checkout as fast as another one? Runs a benchmark of both in turns and compares figures.

    python benchmarks/compare.py --before ../before --figures 'rows.*total_us_p50' \
        scheduler.py --repeats 1 --iterations 50

Figures are numbers of the benchmark's JSON, chosen by a regular expression over their paths. Each
is compared as the median over all rounds; a ratio above 1 means that this checkout is slower, or
with ``--more-is-better`` that it is faster. ``--before`` is a checkout with its own `.venv`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import describe_run, write_result

ROOT = Path(__file__).resolve().parents[1]


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in JSON with its path, such as ``rows.3.served.tokens_per_second``."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from numbers(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from numbers(each, f"{path}.{index}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def measure(checkout: Path, command: list[str], output_option: str) -> dict[str, Any]:
    """The JSON of one run; what the benchmark prints is not shown."""
    script, *arguments = command
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        python = str(checkout / ".venv/bin/python")
        run = [python, f"benchmarks/{script}", *arguments, output_option, str(output)]
        # Some end with 1 where a bound of their own is missed, with their figures written.
        done = subprocess.run(run, cwd=checkout, stdout=subprocess.DEVNULL, check=False)
        if not output.exists():
            raise SystemExit(f"{' '.join(run)} ended with {done.returncode} and no figures")
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return result


def main() -> None:
    """Measure, print the ratios, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--figures", required=True, help="regular expression, found in paths")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--more-is-better", action="store_true")
    parser.add_argument("--output-option", default="--output", help="of the benchmark")
    parser.add_argument("-o", "--output", type=Path, help="default: results/compare_SCRIPT.json")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a benchmark with its arguments")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "now": ROOT}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    commits: dict[str, str] = {}
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            result = measure(checkout, options.command, options.output_option)
            commits[name] = result["commit"]
            for path, number in numbers(result):
                if re.search(options.figures, path):
                    found[path][name].append(number)
    rows = []
    for path, both in found.items():
        if len(both) < len(checkouts):
            continue  # one of them does not measure it
        before, now = (statistics.median(both[name]) for name in checkouts)
        row: dict[str, Any] = {"figure": path, "before": before, "now": now}
        row["ratio"] = round(now / before, 3)
        rows.append(row)
        print("{figure}: {before:g} before, {now:g} now, ratio {ratio}".format(**row))
    ratio = statistics.median(row["ratio"] for row in rows)
    print(f"median ratio {ratio:.3f}")
    result = describe_run("torch", "numpy")
    result |= {"commits": commits, "rounds": options.rounds, "benchmark": options.command}
    result |= {"more_is_better": options.more_is_better, "median_ratio": ratio, "rows": rows}
    name = f"compare_{Path(options.command[0]).stem}"
    print("written to", write_result(name, result, options.output).name)


if __name__ == "__main__":
    main()
