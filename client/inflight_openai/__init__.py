"""``inflight openai``: OpenAI's HTTP API in front of an inflight server, over gRPC.

`command` is the command line, `server` runs `app` under uvicorn. `schema` reads a body's fields,
`generation` makes a `GenerationRequest` of them with `prompts`, `chat` and `special_tokens`,
`triton_client` sends it, and `responses` writes the answer. `tools` reads calls and thoughts
in it; `responses_api` is the newer call that does the same. Needs the extra ``inflight[openai]``.
"""
