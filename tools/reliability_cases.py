"""What must survive: every case of bad input, fault and abuse we promise something about.

The numbers are stable; a test claims a case with ``@pytest.mark.case(56, 57)``, and
`write_reliability_docs.py` writes who claims what. ``absent`` names the feature that a case is
about where the server does not have it; asking for it is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One promise: ``number`` for tests to name, ``text`` for people."""

    number: int
    text: str
    absent: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Cases that belong together."""

    title: str
    cases: tuple[Case, ...]


def _cases(first: int, *texts: str | tuple[str, str]) -> tuple[Case, ...]:
    """Consecutive numbers from ``first``; a pair is (text, absent feature)."""
    pairs = [(text, "") if isinstance(text, str) else text for text in texts]
    return tuple(Case(first + i, text, absent) for i, (text, absent) in enumerate(pairs))


_LORA = "LoRA"
_MULTI_GPU = "more than one GPU"

SECTIONS = (
    Section(
        "Input tensors: refused by name before scheduling, unless stated",
        _cases(
            1,
            "empty `text_input`",
            "empty `input_ids`",
            "text and ids both given",
            "neither text nor ids",
            "text that is not UTF-8",
            "NUL and control characters in the text: served, never logged",
            "half a character at the prompt's end: served, it does not leak into the answer",
            "negative token id",
            "token id = size of the vocabulary",
            "token id 2^31 - 1",
            "prompt as long as the limit: served",
            "prompt one token longer: refused with both numbers",
            "prompt + `max_tokens` = limit: served; one more: refused",
            "`max_tokens` 0",
            "`max_tokens` -1",
            "`max_tokens` 2^31 - 1",
            "`max_tokens` missing: documented default or a named refusal",
            "wrong dtype",
            "wrong rank, two elements for one",
            "several rows in one request: each gets its answer, or the limit is named",
            "temperature NaN, infinite, negative",
            "temperature 0 with top_p: greedy",
            "top_p 0, 1, above 1, NaN",
            "top_k -1, 0, above the vocabulary",
            "repetition penalty 0, NaN",
            "`min_length` above `max_tokens`",
            "beam width 0, above the configured one",
            "beams with streaming: each response holds all of them so far",
            "n = 10^6",
            "seed 2^64 - 1: served, repeatable",
            "`end_id` out of range",
            "empty stop word: passed over, not refused; clients of tensorrtllm_backend send one "
            "for none, and its preprocessing passes over it too",
            "10^4 stop words",
            "stop word of 1 MB",
            "stop word split over tokens and inside a character: stops at the right byte",
            "every token is a bad word: a named error, no endless loop",
            "embedding bias with an unknown token, NaN, wrong length",
            "more log probabilities than the maximum",
            "unknown input; unknown key of a JSON parameter",
            "JSON with doubled keys, 10 MB, 500,000 levels: refused fast, ours and Triton's",
            "known tensor of a feature that is not there: `UNSUPPORTED`, by name",
            ("unknown LoRA name", _LORA),
            ("LoRA name `../../etc`", _LORA),
            "priority out of range",
            "deadline 0, negative, in the past",
        ),
    ),
    Section(
        "Structured output",
        _cases(
            46,
            "invalid JSON schema",
            "regex `foo**`",
            "schema nested 500 deep",
            "schema with 10^5 values",
            "pattern like `(a+)+$`",
            "recursive `$ref`",
            "unsupported keyword",
            "grammar without a possible next token",
            "endless white space",
            "100 grammars at once: few are kept, a bounded number waits, streams go on",
        ),
    ),
    Section(
        "Identity and stop",
        _cases(
            56,
            "id in flight used again: refused, the first goes on",
            "the same id after the final: accepted",
            "stop for an unknown id: acknowledged",
            "stop for a finished id",
            "stop twice",
            "stop before its request: no effect on it",
            "stop in the iteration of the last token: one final",
            "10^5 stops for ids never seen: bounded memory",
            "different ids that might hash alike: both served",
            "id of 1 MB, id with a line break: refused or harmless",
            "stop while queued, in a context chunk, generating, paused: blocks back within one "
            "iteration, half-written blocks never reused",
        ),
    ),
    Section(
        "Clients",
        _cases(
            67,
            "gRPC cancel at every phase",
            "TCP reset in mid-stream",
            "HTTP `generate_stream` closed",
            "HTTP `generate` closed: Triton does not tell; it ends by its deadline",
            "reader that is slow or never reads: bounded buffers, others unharmed",
            "1,000 streams open and idle",
            "next request on the same stream",
            "client deadline passes",
            "all clients vanish at once: everything free again",
        ),
    ),
    Section(
        "Load and memory",
        _cases(
            76,
            "request larger than the KV pool: refused at once",
            "queue full: an immediate, named refusal",
            "KV 4x oversubscribed: everything finishes under every policy",
            "a request that fills the pool beside short ones: both progress",
            "flood of high priority: low priority starts within the bound",
            "long prompts beside generation: token gaps bounded",
            "out of host memory in a step",
            "out of device memory in a step: its requests fail, the rest goes on",
            "very many tiny requests: flat memory",
            "soak with 30 % cancels: every counter zero at the end",
        ),
    ),
    Section(
        "Faults of engine and processes",
        _cases(
            86,
            "exception in a step: its requests fail, the loop lives",
            "logits that are no numbers: that request fails by name",
            "a step that never returns: streams ended, readiness false, restart",
            "anything that escapes the loop: error finals, readiness false, a fresh batch manager",
            "model process killed: clients get an error (within 10 s beside other tests), new "
            "requests are served again; how soon both: the soak above",
            "get callback raises, blocks, returns rubbish, too many or the same twice",
            "send callback raises or blocks",
            "statistics callback raises",
            "stop callback returns rubbish",
            "disk of the recording full: serving goes on",
            "clock jumps back",
            ("ranks diverge", _MULTI_GPU),
            "own scheduler raises, repeats a request, goes over budget: overruled",
        ),
    ),
    Section(
        "Lifecycle and files",
        _cases(
            99,
            "unload with streams in flight",
            "SIGTERM with streams in flight: they finish, or end with an error after the limit",
            "reload 100 times: no growth",
            "weights: truncated, long header, unknown dtype, wrong shape, missing or extra tensor",
            "`config.json` missing or contradictory",
            "tokenizer larger than the embedding: refused with both numbers; smaller is served, "
            "since embeddings are padded",
            "pickled weights",
            "symlink out of the model folder",
            "chat template with attribute access, endless loop, 100 MB: sandboxed, bounded",
            "numpy, Triton or Python that cannot work: one clear line at start; which Python, by "
            "`inflight serve` only, since another one would not run our check",
            "two servers on one host: each serves, and leaves the other's memory alone",
            "cache folder (of compiled kernels) that others can write: refused",
        ),
    ),
    Section(
        "Recordings and plans",
        _cases(
            111,
            "recording truncated, flipped bits, future version: a clear error",
            "recording with hostile numbers",
            "replay of an own recording: identical",
            "recording holds no prompt",
            "`plan` equals the real pool",
            "picture of 10^5 requests: bounded time, memory and size",
        ),
    ),
    Section(
        "Beyond the list",
        _cases(
            117,
            "exactly one final under any order of tokens, stop, cancel, error, failure, unload",
            "everything a request holds is free before its final leaves",
            "tritonserver killed or hung: restarted, clients get an error, no shared memory left",
            "a server that fails again and again: backoff, and if it starts no more one clear line "
            "and exit code 1",
            "256 requests active at once",
            "random tensors, ids, parameters, grammars, recordings, checkpoints: our errors only",
            "errors hold no path, address, key or traceback; the log holds no prompt",
            "launcher killed: server and model end, the next run sweeps what was left",
            "device lost for good: readiness false, and a restart",
            "drain limit: what still runs ends with an error",
        ),
    ),
)
