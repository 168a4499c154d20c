"""From the tensors of a request to an `LlmRequest`, or an error that names the field."""
