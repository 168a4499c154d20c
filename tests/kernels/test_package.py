"""The package and its reference can be imported where there is no Triton (CPU servers)."""

from __future__ import annotations

import subprocess
import sys


def test_reference_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; "
        "import inflight_kernels; assert 'torch' not in sys.modules; "
        "from inflight_kernels import reference; print(reference.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "inflight_kernels.reference"
