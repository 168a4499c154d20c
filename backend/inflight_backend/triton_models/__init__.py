"""The other models of the repository: text, vLLM's inputs, business logic scripting."""
