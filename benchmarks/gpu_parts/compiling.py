"""The kernels of the engines that are measured later, compiled beside one another.

A kernel takes one core for a second or two, and an engine has some twenty: one after another they
would take a fifth of all the time there is. Here each engine has a process, and one layer, which
launches what forty layers launch; it answers requests with steps of every kind. Triton keeps what
it compiled in its cache folder, where the parts behind this one find it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from gpu_parts.common import Row, Setting, make_engine, start_row
from gpu_parts.offline import DRY, RAGGED, engines
from gpu_parts.whole_requests import warm_up


def rows(setting: Setting) -> Iterator[Row]:
    """A row per engine; a quick run measures one only."""
    chosen = list(engines(setting).items())
    for name, (model, config) in setting.own(chosen[:1] if setting.is_quick else chosen):
        start = time.monotonic()
        if not setting.is_dry:
            model = replace(model, num_layers=1, sliding_windows=(None,))
            config = replace(config, max_tokens_in_paged_kv_cache=2**16)
        engine = make_engine(setting, model, config)
        work = DRY[-1] if setting.is_dry else RAGGED
        warm_up(engine, *work.draw(engine.vocab_size))
        yield start_row(setting, name, engine, time.monotonic() - start)
