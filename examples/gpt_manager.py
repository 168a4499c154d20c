"""Serve a checkpoint without Triton: python gpt_manager.py CHECKPOINT "1 2 3" "10 11 12"."""

import sys

from tokenizers import Tokenizer

from inflight_backend import CapacitySchedulerPolicy, GptManager, InferenceRequest, TrtGptModelType

folder, *prompts = sys.argv[1:]
tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
answers = [""] * len(prompts)
ids = [tokenizer.encode(prompt).ids for prompt in prompts]
waiting = [InferenceRequest.from_tokens(i, ids[i], 20, is_streaming=True) for i in range(len(ids))]
waiting.append(InferenceRequest(END := len(ids)))  # the request that ends the loop


def get_requests(room):
    return [waiting.pop(0) for _ in range(min(max(room, 0), len(waiting)))]


def send_response(request_id, tensors, is_final, error):
    answers[request_id] += error or tokenizer.decode(tensors[0].tensor[0, 0])
    if is_final:
        print(prompts[request_id] + answers[request_id])


def poll_stop_signals():
    return {i for i, answer in enumerate(answers) if answer.endswith("13")}


def return_stats(stats_json):
    print(stats_json, file=sys.stderr)


with GptManager(
    folder,
    TrtGptModelType.InflightFusedBatching,
    1,  # max_beam_width
    CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    get_requests,
    send_response,
    poll_stop_signals,
    return_stats,
    terminate_req_id=END,
) as manager:
    manager.wait_until_terminate()
