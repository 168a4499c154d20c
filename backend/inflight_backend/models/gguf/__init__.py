"""GGUF files as checkpoints: metadata to the keys of config.json, and names of tensors.

The families read the same keys from them as from ``config.json``; the blocks of quantised tensors
are read in `quantization.blocks`.
"""
