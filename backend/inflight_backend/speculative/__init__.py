"""Speculative decoding without a second model: where drafts come from, and who may have some.

What is verified, and how it counts, is in `inflight_scheduler.planning.verification`.
"""
