"""Decides what runs in each iteration: requests, blocks, capacity, micro-batch. Pure Python."""
