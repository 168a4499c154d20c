"""The server side: GptManager, the paged-attention engine and the Triton face."""
