"""The loop of the contract: `GptManager`, its callbacks and its statistics."""
