"""``inflight openai``: OpenAI's HTTP API in front of an inflight server, over gRPC.

`command` is the command line, `app` the HTTP side, `upstream` the server's side; between them
`parsing` reads a body into a `GenerationJob` (`field_table` says which fields), `prompts` makes
token ids of text and messages, and `answers` writes what OpenAI's clients expect. Needs the extra
``inflight[openai]``.
"""
