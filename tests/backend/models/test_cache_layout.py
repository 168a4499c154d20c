"""Groups of layers, and where their keys and values lie in the blocks of the pool they share."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from inflight_backend.models.config import (
    AttentionConfig,
    CacheLayout,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    make_cache_layout,
)

FULL = AttentionConfig(num_heads=32, num_kv_heads=16, head_dim=128, scale=1.0)
SMALL = replace(FULL, num_kv_heads=8, head_dim=64)
WIDE, NARROW = replace(FULL, num_kv_heads=4, head_dim=512), replace(FULL, head_dim=256)


def alternating(
    full: AttentionConfig, local: AttentionConfig, count: int, every: int
) -> list[AttentionConfig]:
    """``count`` layers of which each ``every``-th is ``full``."""
    return [full if index % every == every - 1 else local for index in range(count)]


GEMMA_27B = alternating(FULL, replace(FULL, window=1024), 62, 6)


def layout_of(
    layers: list[AttentionConfig], max_seq_len: int = 131_072, *, is_shared: bool = False
) -> CacheLayout:
    decoder = tuple(LayerConfig(each, MlpConfig(64)) for each in layers)
    model = ModelConfig("X", 100, 64, decoder, max_seq_len, NormConfig(), True, "bfloat16")
    return make_cache_layout(model, max_seq_len, is_shared=is_shared)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("layers", "windows", "factor"),
    [
        (GEMMA_27B, (None, *[1024] * 6), 5.9),
        (alternating(SMALL, replace(SMALL, window=128), 24, 2), (None, 128), 2.0),
        (alternating(FULL, replace(FULL, chunk=8192), 48, 4), (None, 8192, 8192, 8192), 3.4),
        ([replace(FULL, window=4096)] * 32, (4096,), 31.8),
        # Two of the layers without a window lie where one of the others does.
        (alternating(WIDE, replace(NARROW, window=1024), 60, 6), (None, *[1024] * 10), 10.3),
        # Groups of a few layers would leave most of their blocks empty.
        ([*[FULL] * 31, replace(FULL, window=4096)], (None,), 1.0),
        ([replace(FULL, window=2**17)] * 3, (None,), 1.0),
        ([FULL] * 3, (None,), 1.0),
    ],
)
def test_a_long_text_takes_less(
    layers: list[AttentionConfig], windows: tuple[int | None, ...], factor: float
) -> None:
    found, whole = layout_of(layers), layout_of(layers, is_shared=True)
    assert found.windows == windows
    assert whole.windows == (None,)
    sizes = [each.num_blocks(131_072, 32) * each.numbers_per_token for each in (whole, found)]
    assert sizes[0] / sizes[1] == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize(
    "layers",
    [
        GEMMA_27B,
        alternating(WIDE, replace(NARROW, window=1024), 60, 6),
        alternating(NARROW, replace(WIDE, window=512), 13, 5),
        [replace(FULL, window=size) for size in (64, 128, 64, 128, 64)],
        [FULL, *[replace(FULL, window=9)] * 4, replace(FULL, window=9, kv_source=2), SMALL],
    ],
)
def test_no_two_tensors_of_a_group_overlap(layers: list[AttentionConfig]) -> None:
    layout = layout_of(layers)
    taken: list[tuple[int, int, int, int]] = []
    for index, (layer, group, places) in enumerate(
        zip(layers, layout.groups, layout.places, strict=True)
    ):
        if layer.kv_source is not None:
            assert (group, places) == (layout.groups[index - 3], layout.places[index - 3])
            continue
        assert layout.windows[group] == layer.window
        assert len(places) == 2
        for region, column in places:
            assert column + layer.kv_size <= layout.region_sizes[region]
            taken.append((group, region, column, column + layer.kv_size))
    for (*one, start, end), (*other, other_start, other_end) in combinations(taken, 2):
        assert one != other or end <= other_start or other_end <= start
