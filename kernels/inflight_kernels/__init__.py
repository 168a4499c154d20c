"""Arithmetic on blocks: the operations an engine is made of.

Importing this package imports neither torch nor triton. Each op is a module of its own, in the
Triton language, with the function of the same name as its entry:

``paged_attention_generation``  one new token per request over its cache, split over the machine
``paged_attention_context``     ragged causal chunks over cached blocks, mixed batches included
``rope_write_kv``               qk-norm, rotary embedding and the cache write in one launch
``rms_norm``                    also with residual sum, also to FP8: ``add_rms_norm``, ``*_fp8``
``silu_mul``                    the gated activation, also to FP8
``quantize_fp8``                rows to FP8 where no norm or activation could do it on its way
``invariant_linear``            a product whose rows do not depend on how many there are
``delta_step``                  a token of each text through a recurrence, the gated delta rule
``copy_blocks``                 copy-on-write, and gather or scatter for a pause
``adjust_logits``               bias, and penalties for what was seen, in one pass
``ban_tokens``                  repeated n-grams, and words that must not be said
``mask_logits``                 what a grammar does not allow, one bit per token
``sample``                      greedy, temperature, top-k, top-p and min-p without a sort

``reference`` is the same in plain torch: what a CPU runs, and what the kernels are tested against.
"""
