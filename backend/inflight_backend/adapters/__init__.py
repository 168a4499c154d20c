"""Adapters (LoRA): read from folders and tensors, kept, and placed where steps need them."""
