"""The Triton face: requests come in through `execute`, responses leave from their own thread."""
