"""Set up before any test module is imported."""

import os
from pathlib import Path

# Triton reads this when it is first imported, whoever does that: without a GPU, kernels run on the
# CPU in the tests.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
