"""Every kernel against the torch reference on the device, and whole engines against each other.

They are shared out among processes that run beside one another: most of the time of a check goes
into compiling, and one that breaks the CUDA context takes few others with it.

The error is ‖out - ref‖ / ‖ref‖ in float32, the reference computed in float32 from the same
rounded inputs. Limits: bf16 results are rounded to 8 bits once or twice (half a unit is 2e-3),
e4m3 to 4 bits (3e-2, and cut off instead 5e-2); a product of 4096 terms in FP8 is summed up by the
tensor cores in less than float32 (estimated at 5e-3); what must be exact has limit 0.

Of a kernel no row may be far away either: what attention makes of 9,000 tokens is a hundred times
smaller than what it makes of one, so a split that is lost would not show in the sum of all.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gpu_parts import draw_checks, engine_checks
from gpu_parts.common import TINY, Row, Setting, make_engine
from gpu_parts.report import shorten
from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.models.layers import Fp8Linear, Quantized, quantize
from inflight_kernels import reference
from inflight_scheduler import BlockAssignment, ContextChunk, SamplingParams, ScheduledBatch
from inflight_scheduler import SlotSetup as Setup

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
_LIMIT = {_BF16: 1e-2, _FP8: 4e-2}
# Of one row, over the limit of all: of 64 numbers in e4m3 the worst rows are half as far again.
_ROW = 2


@dataclass(frozen=True)
class Check:
    """``run`` returns what was computed and what it should be."""

    name: str
    limit: float
    run: Callable[[], tuple[Tensor, Tensor]]
    has_rows: bool = False
    """Whether each row (of the last dimension) must be near, too."""


def kernels(setting: Setting) -> Iterator[Row]:
    """The kernels, one row per check."""
    yield from rows(setting, _kernel_checks(setting))


def engines(setting: Setting) -> Iterator[Row]:
    """Whole engines, one row per check."""
    yield from rows(setting, _engine_checks(setting))


def rows(setting: Setting, checks: Iterator[Check]) -> Iterator[Row]:
    """A check that raises is a row too; behind one that broke the context, none can run."""
    torch.manual_seed(0)
    broken_by = ""
    for check in setting.own(checks):
        row: Row = {"check": check.name, "ok": False}
        if broken_by:
            yield {**row, "error": f"did not run: '{broken_by}' broke the CUDA context"}
            continue
        torch.manual_seed(0)  # the same numbers whatever ran before it
        try:
            out, expected = check.run()
            error = _error(out, expected)
            worst = _worst_row(out, expected) if check.has_rows else 0.0
            is_near = error <= check.limit and worst <= _ROW * check.limit
            told = {"worst_row": f"{worst:.1e}"} if check.has_rows else {}
            yield {**row, "ok": is_near, "error": f"{error:.1e}", **told}
        except Exception as error:  # the next check may still say something
            broken_by = "" if _has_context(setting) else check.name
            traceback.print_exc()  # the row `stderr` will have it
            yield {**row, "error": shorten(f"{type(error).__name__}: {error}", 300)}


def _has_context(setting: Setting) -> bool:
    try:
        setting.synchronize()
    except RuntimeError:
        return False
    return True


def _error(out: Tensor, expected: Tensor) -> float:
    out, expected = out.float(), expected.float()
    if not bool(torch.isfinite(out).all()):
        return float("nan")  # compares as not within any limit
    return float((out - expected).norm() / expected.norm().clamp(min=1e-12))


def _worst_row(out: Tensor, expected: Tensor) -> float:
    """The largest error of a row; NaN if there is one anywhere."""
    out, expected = out.float(), expected.float()
    sizes = expected.norm(dim=-1).clamp(min=1e-12)
    return float(((out - expected).norm(dim=-1) / sizes).max())


def _kernel_checks(setting: Setting) -> Iterator[Check]:
    yield from _token_checks(setting)
    yield from _rope_checks(setting)
    for num_heads, num_kv_heads in ((4, 2),) if setting.is_dry else ((32, 8), (40, 40)):
        for dtype in (_BF16, _FP8):
            # Blocks of 64 as in most that is measured, a tile each; of 32, the default, and of 16,
            # two and four to a tile; of 48, whose tokens look their blocks up one by one.
            for window, size in ((None, 64), (None, 32), (37, 16), (None, 48)):
                shape = f"{num_heads}/{num_kv_heads} {_name(dtype)}"
                label = f"{shape} window {window} blocks of {size}"
                model = (num_heads, num_kv_heads, dtype, window, size)
                run = partial(_generation, setting, *model)
                yield Check(f"generation {label}", _LIMIT[_BF16], run, has_rows=True)
                run = partial(_context, setting, *model)
                yield Check(f"context {label}", _LIMIT[_BF16], run, has_rows=True)
    yield from _trait_checks(setting)
    for dtype in (_BF16, torch.float32):  # as drawn from, and as changed before
        yield Check(f"sample {_name(dtype)}", 0.0, partial(_sample, setting, dtype))
    for name, limit, draw in draw_checks.CHECKS:
        yield Check(name, limit, partial(draw, setting))
    yield Check("copy_blocks", 0.0, partial(_copy, setting))
    # Few tokens and many columns: what cuBLAS is known to refuse with a scale per row.
    for tokens, columns in ((17, 4096), (1, 14_336), (256, 14_336), (300, 14_336)):
        run = partial(_fp8_linear, setting, tokens, columns)
        yield Check(f"fp8 linear {tokens} x {columns}", 2e-2, run, has_rows=True)
    for dtype, limit in ((_BF16, _LIMIT[_BF16]), (_FP8, 2e-2)):
        for tokens in (1, 40, 70):
            run = partial(_invariant_linear, setting, dtype, tokens)
            yield Check(f"invariant_linear {_name(dtype)} {tokens}", limit, run, has_rows=True)
        run = partial(_invariant_rows, setting, dtype)
        yield Check(f"invariant_linear {_name(dtype)} in every tile", 0.0, run)


def _trait_checks(setting: Setting) -> Iterator[Check]:
    """What some families ask of attention, and a mixture of experts."""
    num_heads, num_kv_heads = (4, 2) if setting.is_dry else (32, 8)
    heads = torch.linspace(0.1, 1.0, num_heads, device=setting.device)
    for name, options in (
        ("softcap", {"softcap": 5.0}),
        ("attention chunks of 64", {"chunk": 64}),
        ("sinks", {"sinks": 5 * heads}),
        ("slopes", {"slopes": heads}),
    ):
        model = (num_heads, num_kv_heads, _BF16, None, 32)
        for kind, attend in (("generation", _generation), ("context", _context)):
            run = partial(attend, setting, *model, **options)
            yield Check(f"{kind} with {name}", _LIMIT[_BF16], run, has_rows=True)
    for *counts, dim in ((8, 2, 512), (128, 1, 576)):
        for kind, attend in (("generation", _generation), ("context", _context)):
            run = partial(attend, setting, counts[0], counts[1], _BF16, None, 32, dim=dim)
            yield Check(
                f"{kind} {counts[0]}/{counts[1]} of {dim}", _LIMIT[_BF16], run, has_rows=True
            )
    run = partial(_grouped_linear, setting)
    yield Check("grouped_linear", _LIMIT[_BF16], run, has_rows=True)


def _engine_checks(setting: Setting) -> Iterator[Check]:
    """Limits: bf16 keeps 8 bits, so a perplexity moves by 1e-3; e4m3 keeps 4, and the logits of a
    random model of two layers come out 8 % away (measured on a CPU), so 15 % is a fault."""
    run = engine_checks
    yield Check("triton against torch, float32", 0.0, partial(_engines, setting))
    if not setting.is_dry:
        yield Check("recorded against eager, bf16", 0.0, partial(_graphs, setting, "none"))
        yield Check("recorded against eager, fp8", 0.0, partial(_graphs, setting, "fp8"))
    run_mixed = partial(run.recorded_mixed_steps, setting)
    yield Check("mixed steps recorded against eager, float32", 0.0, run_mixed)
    if is_there("transformers"):
        yield Check("float32 tokens are transformers'", 0.0, partial(run.equal_tokens, setting))
    yield Check("perplexity in bf16", 1e-2, partial(run.perplexity, setting, "bfloat16"))
    yield Check("block reuse, float32", 0.0, partial(run.reuse, setting))
    yield Check("no NaN at awkward lengths", 0.0, partial(run.adversarial, setting))
    yield Check("fp8 logits", 0.15, partial(run.fp8_logits, setting))
    if not setting.is_dry:  # the tests have it at a size that an interpreter can do
        yield Check("a request alone and among 31", 0.0, partial(run.deterministic, setting))


def is_there(package: str) -> bool:
    """Whether it can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _token_checks(setting: Setting) -> Iterator[Check]:
    norms, silu = (
        import_module("inflight_kernels.ops.rms_norm"),
        import_module("inflight_kernels.ops.silu_mul"),
    )
    quantization = import_module("inflight_kernels.ops.linear.quantize_fp8")
    shape = (3, 80) if setting.is_dry else (257, 4096)
    x, residual = (torch.randn(shape, dtype=_BF16, device=setting.device) for _ in range(2))
    weight = torch.randn(shape[1], dtype=_BF16, device=setting.device)
    wide = torch.randn(shape[0], 2 * shape[1], dtype=_BF16, device=setting.device)
    normed = reference.rms_norm(x.float(), weight.float(), 1e-5)
    added = reference.add_rms_norm(x, residual, weight, 1e-5)[0]
    gated = reference.silu_mul(wide.float())
    limit, fp8 = _LIMIT[_BF16], _LIMIT[_FP8]

    def scaled(pair: tuple[Tensor, ...]) -> Tensor:
        return pair[0].float() * pair[1]

    for name, near, run in (
        ("rms_norm", limit, lambda: (norms.rms_norm(x, weight, 1e-5), normed)),
        ("add_rms_norm", limit, lambda: (norms.add_rms_norm(x, residual, weight, 1e-5)[0], added)),
        ("rms_norm_fp8", fp8, lambda: (scaled(norms.rms_norm_fp8(x, weight, 1e-5)), normed)),
        (
            "add_rms_norm_fp8",
            fp8,
            lambda: (scaled(norms.add_rms_norm_fp8(x, residual, weight, 1e-5)[:2]), added),
        ),
        ("silu_mul", limit, lambda: (silu.silu_mul(wide), gated)),
        ("silu_mul_fp8", fp8, lambda: (scaled(silu.silu_mul_fp8(wide)), gated)),
        ("quantize_fp8", fp8, lambda: (scaled(quantization.quantize_fp8(x)), x)),
    ):
        yield Check(name, near, run, has_rows=True)


def _rope_checks(setting: Setting) -> Iterator[Check]:
    for has_norms in (False, True):
        for dtype in (_BF16, _FP8):
            label = f"rope_write_kv {_name(dtype)}{' with norms' if has_norms else ''}"
            run = partial(_rope, setting, dtype, has_norms)
            yield Check(label, _LIMIT[dtype], run, has_rows=True)


def _rope(setting: Setting, dtype: torch.dtype, has_norms: bool) -> tuple[Tensor, Tensor]:
    """Query, and all of the caches after the write, one below the other."""
    rope = import_module("inflight_kernels.ops.attention.rope_write_kv")
    device, count, dim = setting.device, 5 if setting.is_dry else 130, 64
    heads = torch.randn(count, 12, dim, dtype=_BF16, device=device)
    query, key, value = torch.split(heads, [8, 2, 2], dim=1)
    angles = torch.rand(512, dim // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(512, (count,), device=device)
    slots = torch.randperm(16 * (count // 16 + 2), device=device)[:count]
    caches = torch.zeros(2, count // 16 + 2, 16, 2, dim, device=device).to(dtype)
    weights = torch.rand(2, dim, dtype=_BF16, device=device) + 0.5
    norms = tuple(weights) if has_norms else (None, None)
    out = rope.rope_write_kv(
        query, key, value, cos_sin, positions, caches[0], caches[1], slots, *norms, 1e-5
    )
    query, key = query.float(), key.float()
    if has_norms:
        query = reference.rms_norm(query, weights[0].float(), 1e-5)
        key = reference.rms_norm(key, weights[1].float(), 1e-5)
    query, key = reference.apply_rope(query, key, cos_sin, positions)
    written = torch.zeros(caches.shape, device=device).view(2, -1, 2, dim)
    written[:, slots] = torch.stack((key, value.float()))
    expected = torch.cat((query.reshape(-1, dim), written.view(-1, dim)))
    return torch.cat((out.float().view(-1, dim), caches.float().view(-1, dim))), expected


def _paged(
    setting: Setting, lengths: list[int], num_kv_heads: int, dtype: torch.dtype, size: int, dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Caches with NaN in all that no request owns, block tables, lengths; blocks of ``size``."""
    dim = 16 if setting.is_dry else dim
    per_row = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(per_row), dtype=torch.int32)
    tables = torch.zeros(len(lengths), max(per_row), dtype=torch.int32)
    shape = (2, sum(per_row), size, num_kv_heads, dim)
    caches = torch.randn(shape, device=setting.device)
    first = 0
    for row, (count, length) in enumerate(zip(per_row, lengths, strict=True)):
        tables[row, :count] = order[first : first + count]
        first += count
        if length % size:
            caches[:, tables[row, count - 1], length % size :] = torch.nan
    found = torch.tensor(lengths, dtype=torch.int32, device=setting.device)
    keys, values = caches.to(_BF16).to(dtype).unbind()
    return keys, values, tables.to(setting.device), found


def _generation(
    setting: Setting, num_heads: int, num_kv_heads: int, dtype: torch.dtype, window: int | None,
    size: int, dim: int = 128, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    op = import_module("inflight_kernels.ops.attention.paged_attention_generation")
    # The longest are cut into splits.
    lengths = [1, size - 1, size, size + 1]
    lengths += [200] if setting.is_dry else [100, 1000, 3001, 9000]
    keys, values, tables, found = _paged(setting, lengths, num_kv_heads, dtype, size, dim)
    dim = keys.shape[-1]
    query = torch.randn(len(lengths), num_heads, dim, dtype=_BF16, device=setting.device)
    out = op.paged_attention_generation(
        query, keys, values, tables, found, dim**-0.5, window, **options
    )
    plain = keys.float().nan_to_num(), values.float().nan_to_num()
    return out, reference.paged_attention_generation(
        query.float(), *plain, tables, found, dim**-0.5, window, **options
    )


def _context(
    setting: Setting, num_heads: int, num_kv_heads: int, dtype: torch.dtype, window: int | None,
    size: int, dim: int = 128, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    op = import_module("inflight_kernels.ops.attention.paged_attention_context")
    more = not setting.is_dry
    lengths = [1, size, size + 1, *([500, 1500, 2049] if more else [])]
    chunks = [1, size, 3, *([500, 200, 2049] if more else [])]
    keys, values, tables, found = _paged(setting, lengths, num_kv_heads, dtype, size, dim)
    dim = keys.shape[-1]
    query = torch.randn(sum(chunks), num_heads, dim, dtype=_BF16, device=setting.device)
    starts = torch.tensor([0, *chunks], device=setting.device).cumsum(0).int()
    out = op.paged_attention_context(
        query, keys, values, tables, starts, found, dim**-0.5, window, **options
    )
    plain = keys.float().nan_to_num(), values.float().nan_to_num()
    return out, reference.paged_attention_context(
        query.float(), *plain, tables, starts, found, dim**-0.5, window, **options
    )


def _grouped_linear(setting: Setting) -> tuple[Tensor, Tensor]:
    """Groups of no, one and many rows."""
    op = import_module("inflight_kernels.ops.linear.grouped_linear")
    sizes = [0, 1, 3] if setting.is_dry else [0, 1, 300, 17, 0, 64]
    num_rows, columns = (24, 80) if setting.is_dry else (1000, 2048)
    x = torch.randn(sum(sizes), columns, dtype=_BF16, device=setting.device)
    weight = torch.randn(len(sizes), num_rows, columns, dtype=_BF16, device=setting.device)
    starts = torch.tensor([0, *sizes], device=setting.device).cumsum(0).int()
    parts = zip(torch.split(x.float(), sizes), weight.float(), strict=True)
    return op.grouped_linear(x, weight, starts), torch.cat([some @ own.t() for some, own in parts])


def _sample(setting: Setting, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens of greedy and filtered rows, but for those where the sixth digit decides."""
    sampling = import_module("inflight_kernels.ops.sampling.sample")
    device = setting.device
    count, vocabulary = (5, 50) if setting.is_dry else (80, 128_256)
    logits = (4 * torch.randn(count, vocabulary, device=device)).to(dtype)
    kinds = torch.arange(count, device=device) % 5
    arguments = (
        logits.float(),
        torch.where(kinds == 0, 0.0, 0.8),
        torch.where((kinds == 1) | (kinds == 4), 20, 0).int(),
        torch.where((kinds == 2) | (kinds == 4), 0.9, 1.0),
        torch.arange(count, device=device),
        torch.arange(count, device=device) + 5,
    )
    found, expected = sampling.sample(logits, *arguments[1:]), reference.sample(*arguments)
    return draw_checks.where_clear(found, expected, arguments)


def _copy(setting: Setting) -> tuple[Tensor, Tensor]:
    op = import_module("inflight_kernels.ops.attention.copy_blocks")
    source = torch.randn(2, 6, 16, 2, 64, dtype=_BF16, device=setting.device)
    target = torch.zeros_like(source)
    origin, to = (
        torch.tensor(ids, dtype=torch.int32, device=setting.device)
        for ids in ([4, -1, 0], [1, 2, 5])
    )
    op.copy_blocks(source, target, origin, to)
    expected = torch.zeros_like(source)
    expected[:, [1, 5]] = source[:, [4, 0]]
    return target, expected


def _fp8_linear(setting: Setting, tokens: int, columns: int) -> tuple[Tensor, Tensor]:
    columns = 64 if setting.is_dry else columns
    weight, x = (
        torch.randn(rows_, columns, dtype=_BF16, device=setting.device)
        for rows_ in (64 if setting.is_dry else 4096, tokens)
    )
    rounded, activation = quantize(weight), quantize(x)
    expected = (activation.values.float() * activation.scales) @ (
        rounded.values.float() * rounded.scales
    ).t()
    return Fp8Linear(weight)(activation), expected


def _invariant_linear(
    setting: Setting, dtype: torch.dtype, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Beside the product in float32."""
    x, rows_ = _factors(setting, dtype, num_tokens)
    if isinstance(x, Tensor):
        return _invariant(x, rows_), x.float() @ rows_.float().t()
    expected = (x.values.float() * x.scales) @ (rows_.values.float() * rows_.scales).t()
    return _invariant(x, rows_), expected


def _invariant_rows(setting: Setting, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows in batches of every tile, beside the same rows of one batch: bit by bit."""
    x, rows_ = _factors(setting, dtype, 3 if setting.is_dry else 300)
    whole = _invariant(x, rows_)
    few = [1, 2] if setting.is_dry else [1, 16, 17, 64, 65, 200]
    parts = [
        x[:count] if isinstance(x, Tensor) else Quantized(x.values[:count], x.scales[:count])
        for count in few
    ]
    found = torch.cat([_invariant(part, rows_) for part in parts])
    return found, torch.cat([whole[:count] for count in few])


def _factors(setting: Setting, dtype: torch.dtype, num_tokens: int) -> tuple[Any, Any]:
    """Tokens and rows of a weight, in FP8 as `Quantized`."""
    num_rows, columns = (24, 80) if setting.is_dry else (1000, 4096)
    x, weight = (
        torch.randn(count, columns, dtype=_BF16, device=setting.device)
        for count in (num_tokens, num_rows)
    )
    return (x, weight) if dtype == _BF16 else (quantize(x), quantize(weight))


def _invariant(x: Any, weight: Any) -> Tensor:
    op = import_module("inflight_kernels.ops.linear.invariant_linear").invariant_linear
    if isinstance(x, Tensor):
        found: Tensor = op(x, weight)
    else:
        found = op(x.values, weight.values, x_scales=x.scales, weight_scales=weight.scales)
    return found


def _engines(setting: Setting) -> tuple[Tensor, Tensor]:
    """Greedy tokens of the same weights on both backends, recorded where there is a GPU."""
    found, expected = (
        _generate(setting, _engine(setting, EngineConfig(dtype="float32", attention_backend=name)))
        for name in ("triton", "torch")
    )
    return found, expected


def _graphs(setting: Setting, quantization: str) -> tuple[Tensor, Tensor]:
    """Greedy tokens with and without recorded steps; an engine that has none compares nothing.
    (Mixed steps are left eager: recorded, they are padded, and a library may sum other numbers of
    rows in another order.)"""
    kv_cache = "fp8" if quantization == "fp8" else "auto"
    config = EngineConfig(
        dtype="bfloat16",
        quantization=quantization,
        kv_cache_dtype=kv_cache,
        cuda_graph_mixed_tokens=0,
    )
    recorded = _engine(setting, config)
    if not recorded.num_graphs:
        raise RuntimeError("no step could be recorded; stderr says why")
    eager = _engine(setting, replace(config, cuda_graph_mode=False))
    return _generate(setting, recorded), _generate(setting, eager)


def _engine(setting: Setting, config: EngineConfig) -> Engine:
    """With the tiny model and as many slots as there are prompts."""
    num_slots = len(_lengths(setting))
    config = replace(
        config,
        max_batch_size=num_slots,
        max_num_tokens=256,
        tokens_per_block=16,
        max_tokens_in_paged_kv_cache=16 * 8 * num_slots,
    )
    return make_engine(setting, TINY, config)


def _lengths(setting: Setting) -> list[int]:
    return [3, 9] if setting.is_dry else [1, 7, 16, 17, 40, 100]


def _generate(setting: Setting, engine: Engine) -> Tensor:
    """Greedy tokens of a few prompts."""
    lengths = _lengths(setting)
    num_tokens = 2 if setting.is_dry else 24
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(TINY.vocab_size, (length,), generator=generator).tolist()
        for length in lengths
    ]
    slots = range(len(lengths))
    blocks = [(slot, index, 8 * slot + index) for slot in slots for index in range(8)]
    batch = ScheduledBatch(
        1,
        tuple(Setup(slot, slot + 1, SamplingParams()) for slot in slots),
        tuple(BlockAssignment(*block) for block in blocks),
        tuple(ContextChunk(slot, 0, tuple(prompts[slot]), is_last=True) for slot in slots),
    )
    tokens = [engine.execute(batch)]
    for _ in range(num_tokens - 1):
        tokens.append(engine.execute(ScheduledBatch(2, generation_slots=tuple(slots))))
    return torch.tensor(tokens)
