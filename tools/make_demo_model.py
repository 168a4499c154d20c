"""Write the demo model: a Llama checkpoint that counts, its weights set by hand, not trained.

Counting needs the last two numbers at every token, so a cache that loses or swaps them shows up as
a wrong digit (older tokens carry no weight: damage there stays unseen). No training means no luck:
the count is exact, and every weight has a reason. After a prompt in decimal numbers it goes

* up by one: ``1 2 3`` gives `` 4 5 6 ...``, also after a single number that follows the BOS token;
* up by two, when the last two numbers differ by two: ``2 4`` gives `` 6 8 ...``;
* down by one, when they fall by one: ``3 2`` gives `` 1 0`` and then the EOS token.

Any other text starts a count at 1. Numbers have at most `MAX_DIGITS` digits.

How it works. A residual channel holds one yes/no fact (`FEATURES`). A *separator* is any token but
a digit, its *plan* describes the number that follows. Heads look back a fixed number of tokens or
one of several, chosen by a fact; MLP neurons are logical ANDs. One line per layer:

====== ===================================== =================================================
layer  attention fetches                     MLP decides
====== ===================================== =================================================
0      where the separators are              index of a digit; length of a finished number
1      units of the last two numbers         the step: two, down, else one
2      digits of the last number             how far the carry ripples, length of the next number
3      the plan, from the last separator     what happens to the digit due now
4      the digit of the last number above    the next token
====== ===================================== =================================================

The same number of tokens back is the same place in the last number because both are aligned on
the length of the *next* one (``99`` is read as ``099``, ``10`` going down as ``0``).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_DIGITS = 5
MAX_POSITIONS = 8192
HIDDEN_SIZE = 128
NUM_LAYERS = 5
NUM_HEADS = 8
NUM_KV_HEADS = 2
HEAD_DIM = 16
INTERMEDIATE_SIZE = 64
ROPE_THETA = 10_000.0

BOS, EOS = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }} {% endfor %}"
"""A chat is the numbers of its messages; the answer counts on."""

DIGITS = range(10)
LENGTHS = range(1, MAX_DIGITS + 1)
"""Lengths of a number; also indices of a digit, the most significant being 1."""

ONE = 512.0
"""The value of the channel that is always on: so large that RMSNorm divides by it alone."""
SHARPNESS = (16.0, 80.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0)
"""Size of queries per rotary frequency; keys have `KEY_SIZE`. Chosen so that any token but the
wanted one scores at least 40 less, up to `MAX_POSITIONS`, and that where the wanted one would
lie before the text, the first token scores best by as much."""
KEY_SIZE = 16.0
STEEPNESS = 40.0
"""Gate of a neuron per fact: silu(+20) is 20 and silu(-20) is 0, up to e^-20."""
LOGIT = 16.0
"""Logit of the right token; others have 0. Sampling at temperature 1 still counts."""

Group = str | tuple[str, ...]
"""A fact, or facts of which at most one is true, read as their OR."""


def _family(name: str, numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"{name}{number}" for number in numbers)


PLAN = (
    *_family("carry", LENGTHS),  # the last j digits ripple: 9s going up, 0s going down
    *_family("length", range(MAX_DIGITS + 2)),  # of the next number; 0: nothing to continue
    *("two", "down", "stop"),
)
FEATURES = (
    *("one", "separator", "space", *_family("digit", DIGITS)),  # the token itself
    *_family("separator-", range(1, MAX_DIGITS + 2)),  # layer 0: j tokens back is a separator
    *_family("index", range(1, MAX_DIGITS + 2)),  # digits of this number, up to this token
    *_family("ended", range(MAX_DIGITS + 1)),  # digits of the number before this separator
    *_family("units", DIGITS),  # layer 1: last digit of the last number
    *_family("before", DIGITS),  # last digit of the number before that
    *_family("nine-", LENGTHS),  # layer 2: j tokens back is a 9
    *_family("zero-", LENGTHS),
    *_family("lead-", LENGTHS),  # j tokens back is a 1
    *("eight-1",),
    *PLAN,
    *(f"plan.{name}" for name in PLAN),  # layer 3: the same facts, for the digits that follow
    *("add1", "add2", "sub1", "done"),  # done: the next token is no digit of the last number
    *_family("old", DIGITS),  # layer 4: the digit to continue; a separator counts as 0
    *("out.space", "out.end", *_family("out", DIGITS)),
)
CHANNEL = {name: channel for channel, name in enumerate(FEATURES)}


class Llama:
    """Weights under construction, in the names and layout of a Hugging Face checkpoint."""

    def __init__(self, vocab_size: int) -> None:
        config = llama_config(vocab_size)
        self.model = LlamaForCausalLM(config)
        self.weights: dict[str, torch.Tensor] = {
            name: torch.zeros_like(tensor) for name, tensor in self.model.state_dict().items()
        }
        self._values: dict[tuple[int, int], dict[Group, int]] = {}
        self._num_neurons = [0] * NUM_LAYERS
        for name, tensor in self.weights.items():
            if name.endswith("norm.weight"):
                # x / rms * weight returns every fact as it is, and the constant as 1.
                tensor[:] = ONE / math.sqrt(HIDDEN_SIZE)
                tensor[CHANNEL["one"]] = 1 / math.sqrt(HIDDEN_SIZE)

    def look_back(
        self, layer: int, head: int, where: Mapping[str, int], copy: Mapping[str, Group]
    ) -> None:
        """Make a head copy facts (target: source) from a token some positions back.

        ``where`` gives the distance by the fact that is true here; ``"one"`` always is. Keys are
        the same everywhere, so rotary embedding alone decides: the query is turned back by the
        distance, and the score is the sum of ``cos(frequency * error)``, largest at error 0.
        """
        attention = f"model.layers.{layer}.self_attn"
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        half = HEAD_DIM // 2
        frequency = ROPE_THETA ** (-torch.arange(half, dtype=torch.float64) / half)
        size = torch.tensor(SHARPNESS)
        query = self.weights[f"{attention}.q_proj.weight"].view(NUM_HEADS, 2, half, -1)[head]
        for fact, distance in where.items():
            query[0, :, CHANNEL[fact]] = size * torch.cos(distance * frequency).float()
            query[1, :, CHANNEL[fact]] = -size * torch.sin(distance * frequency).float()
        key = self.weights[f"{attention}.k_proj.weight"].view(NUM_KV_HEADS, 2, half, -1)
        key[kv_head, 0, :, CHANNEL["one"]] = KEY_SIZE
        value = self.weights[f"{attention}.v_proj.weight"].view(NUM_KV_HEADS, HEAD_DIM, -1)
        output = self.weights[f"{attention}.o_proj.weight"].view(-1, NUM_HEADS, HEAD_DIM)
        slots = self._values.setdefault((layer, kv_head), {})
        for target, source in copy.items():
            slot = slots.setdefault(source, len(slots))
            for fact in _facts(source):
                value[kv_head, slot, CHANNEL[fact]] = 1
            output[CHANNEL[target], head, slot] = 1

    def neuron(
        self,
        layer: int,
        when: Sequence[Group],
        then: Mapping[str, float] | str,
        unless: Sequence[str] = (),
    ) -> None:
        """Add an AND: if all of ``when`` and none of ``unless`` hold, add to the facts ``then``."""
        mlp = f"model.layers.{layer}.mlp"
        row = self._num_neurons[layer]
        self._num_neurons[layer] += 1
        gate = self.weights[f"{mlp}.gate_proj.weight"][row]
        for group in when:
            for fact in _facts(group):
                gate[CHANNEL[fact]] += STEEPNESS
        for fact in unless:
            gate[CHANNEL[fact]] -= STEEPNESS
        gate[CHANNEL["one"]] -= STEEPNESS * (len(when) - 0.5)
        self.weights[f"{mlp}.up_proj.weight"][row, CHANNEL["one"]] = 1
        down = self.weights[f"{mlp}.down_proj.weight"]
        for fact, amount in ({then: 1.0} if isinstance(then, str) else then).items():
            down[CHANNEL[fact], row] = amount / (STEEPNESS / 2)


def _facts(group: Group) -> tuple[str, ...]:
    return (group,) if isinstance(group, str) else group


def _find_places(llama: Llama) -> None:
    """Layer 0: count the digits since the last separator, by looking for it at each distance."""
    distances = range(1, MAX_DIGITS + 2)
    for distance in distances:
        seen = {f"separator-{distance}": "separator"}
        llama.look_back(0, distance - 1, {"one": distance}, seen)
    for distance in distances:
        nearer = _family("separator-", range(1, distance))
        found = [f"separator-{distance}"]
        llama.neuron(0, found, f"index{distance}", unless=[*nearer, "separator"])
        llama.neuron(0, [*found, "separator"], f"ended{distance - 1}", unless=nearer)


def _find_step(llama: Llama) -> None:
    """Layer 1: compare the units of the last two numbers."""
    llama.look_back(1, 0, {"one": 1}, {f"units{d}": f"digit{d}" for d in DIGITS})
    two_separators = {f"ended{length}": length + 2 for length in range(MAX_DIGITS + 1)}
    llama.look_back(1, 1, two_separators, {f"before{d}": f"digit{d}" for d in DIGITS})
    for digit in DIGITS:
        llama.neuron(1, [f"before{digit}", f"units{(digit + 2) % 10}"], "two")
        llama.neuron(1, [f"before{digit}", f"units{(digit - 1) % 10}"], "down")


def _plan_next_number(llama: Llama) -> None:
    """Layer 2: find the digits the carry changes, and with them the length of the next number."""
    for back in LENGTHS:
        seen = {f"nine-{back}": "digit9", f"zero-{back}": "digit0", f"lead-{back}": "digit1"}
        if back == 1:
            seen["eight-1"] = "digit8"
        llama.look_back(2, back - 1, {"one": back}, seen)
    for length in range(MAX_DIGITS + 1):
        llama.neuron(2, [f"ended{length}"], f"length{length}")
    for length in LENGTHS:
        nines = _family("nine-", range(1, length + 1))
        zeros = _family("zero-", range(1, length + 1))
        ripples_up: tuple[tuple[Sequence[Group], Sequence[str]], ...] = (
            (nines, ("two", "down")),
            ((("eight-1", "nine-1"), *nines[1:], "two"), ()),
        )
        longer = {f"length{length}": -1.0, f"length{length + 1}": 1.0}
        for when, unless in ripples_up:
            llama.neuron(2, when, f"carry{length}", unless)
            llama.neuron(2, [*when, f"ended{length}"], longer, unless)
        llama.neuron(2, [*zeros, "down"], f"carry{length}")
        if length > 1:
            power_of_ten = [*zeros[:-1], f"lead-{length}", f"ended{length}"]
            shorter = {f"length{length}": -1.0, f"length{length - 1}": 1.0}
            llama.neuron(2, [*power_of_ten, "down"], shorter)
    llama.neuron(2, ["ended1", "zero-1", "down"], "stop")


def _choose_operation(llama: Llama) -> None:
    """Layer 3: bring the plan to every digit and say what becomes of the digit due now."""
    distances = {"separator": 0} | {f"index{index}": index for index in range(1, MAX_DIGITS + 2)}
    llama.look_back(3, 0, distances, {f"plan.{name}": name for name in PLAN})
    written = ("separator", *_family("index", range(1, MAX_DIGITS + 2)))
    for length in range(1, MAX_DIGITS + 2):
        due = [f"plan.length{length}", written[length - 1]]
        llama.neuron(3, due, "add1", unless=["plan.two", "plan.down", "stop"])
        llama.neuron(3, [*due, "plan.two"], "add2")
        llama.neuron(3, [*due, "plan.down"], "sub1", unless=["stop"])
        for ripple in range(1, length):
            due = [f"plan.length{length}", written[length - 1 - ripple], f"plan.carry{ripple}"]
            llama.neuron(3, due, "add1", unless=["plan.down"])
            llama.neuron(3, [*due, "plan.down"], "sub1")
        complete = [f"plan.length{length}", f"index{length}"]
        llama.neuron(3, complete, {"done": 1, "out.space": 1})
    # Down to zero: the number just written is 0, or (after "1 0") its separator is there already.
    zero = ["plan.length1", "index1", "plan.down", "digit0"]
    llama.neuron(3, zero, {"out.end": 1, "out.space": -1})
    llama.neuron(3, ["stop", "separator"], {"done": 1, "out.end": 1})
    # Nothing to continue: the first number ends where the prompt ends; other text starts at 1.
    llama.neuron(3, ["plan.length0"], {"done": 1, "out.space": 1}, unless=["space"])
    llama.neuron(3, ["plan.length0", "space"], {"done": 1, "out1": 1})


def _write_digit(llama: Llama) -> None:
    """Layer 4: fetch the digit due now from the last number and apply the operation."""
    due = {f"plan.length{length}": length for length in range(1, MAX_DIGITS + 2)}
    old: dict[str, Group] = {f"old{digit}": f"digit{digit}" for digit in DIGITS}
    old["old0"] = ("digit0", "separator")  # the leading zero of 099
    llama.look_back(4, 0, due, old)
    changes = ("add1", "add2", "sub1")
    for digit in DIGITS:
        was = f"old{digit}"
        llama.neuron(4, [was, tuple(due)], f"out{digit}", unless=[*changes, "done"])
        for change, amount in zip(changes, (1, 2, -1), strict=True):
            llama.neuron(4, [was, change], f"out{(digit + amount) % 10}")


def llama_config(vocab_size: int) -> Any:
    """The shape of the model; BOS is token 0 and EOS token 1."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
        dtype="float32",
    )


def make_tokenizer() -> Any:
    """One token per byte (no merges), BOS in front of every text, exact round trips."""
    vocab = {BOS: 0, EOS: 1}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: Any) -> Any:
    """Set every weight; returns a `LlamaForCausalLM` in float32, ready to run."""
    llama = Llama(len(tokenizer))
    embedding = llama.weights["model.embed_tokens.weight"]
    head = llama.weights["lm_head.weight"]
    embedding[:, CHANNEL["one"]] = ONE
    embedding[:, CHANNEL["separator"]] = 1
    space = tokenizer.convert_tokens_to_ids("Ġ")
    embedding[space, CHANNEL["space"]] = 1
    head[space, CHANNEL["out.space"]] = LOGIT
    head[space, CHANNEL["one"]] = LOGIT / 16  # where no rule applies, a space
    head[tokenizer.eos_token_id, CHANNEL["out.end"]] = LOGIT
    for digit in DIGITS:
        token = tokenizer.convert_tokens_to_ids(str(digit))
        embedding[token, CHANNEL["separator"]] = 0
        embedding[token, CHANNEL[f"digit{digit}"]] = 1
        head[token, CHANNEL[f"out{digit}"]] = LOGIT
    for build_layer in (
        _find_places,
        _find_step,
        _plan_next_number,
        _choose_operation,
        _write_digit,
    ):
        build_layer(llama)
    llama.model.load_state_dict(llama.weights)
    return llama.model.eval()


@torch.inference_mode()
def smallest_margin(model: Any, tokenizer: Any, prompt: str, continuation: str) -> float:
    """Least lead, in logits, of each token of ``continuation`` over all others after ``prompt``.

    Above 0 a greedy decoder writes just ``continuation``; ``ValueError`` says where it would not.
    """
    prompt_length = len(tokenizer(prompt)["input_ids"])
    tokens = torch.tensor(tokenizer(prompt + continuation)["input_ids"])
    logits = model(tokens[None, :-1]).logits[0, prompt_length - 1 :].float()
    wanted = tokens[prompt_length:, None]
    margins = logits.gather(1, wanted)[:, 0] - logits.scatter(1, wanted, -math.inf).amax(1)
    worst = int(margins.argmin())
    if margins[worst] <= 0:
        written = tokenizer.decode(tokens[: prompt_length + worst])[-40:]
        raise ValueError(f"after {written!r} the model does not continue the count")
    return float(margins[worst])


def verify(model: Any, tokenizer: Any) -> float:
    """Check every step of the count up to 12,000 and full contexts; returns the least margin."""

    def margin_of_count(first: int, num_tokens: int) -> float:
        numbers = " ".join(str(number) for number in range(first, first + num_tokens // 2))
        prompt = str(first)
        return smallest_margin(model, tokenizer, prompt, numbers[len(prompt) : num_tokens - 1])

    margins = [margin_of_count(first, 640) for first in range(0, 12_000, 100)]
    print(f"counted to 12,000 from 120 starts, least margin {min(margins):.2f}")
    for first in (0, 9_000):
        margins.append(margin_of_count(first, MAX_POSITIONS))
        print(f"counted from {first} to the end of the context, least margin {margins[-1]:.2f}")
    for prompt, continuation in (("12 11", " 10 9 8 7 6 5 4 3 2 1 0" + EOS), ("6 8", " 10 12 14")):
        margins.append(smallest_margin(model, tokenizer, prompt, continuation))
    return min(margins)


def main() -> None:
    """Make, verify and save the checkpoint; nothing is written when the count has an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parents[1] / "backend" / "inflight_backend" / "demo_model"
    parser.add_argument("--output", type=Path, default=default, help="folder to write")
    output: Path = parser.parse_args().output
    torch.set_num_threads(2)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    margin = verify(model, tokenizer)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)  # safetensors makes it private to its owner
    print(f"saved {output}, least margin {margin:.2f}")


if __name__ == "__main__":
    main()
