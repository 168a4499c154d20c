"""Requests as calls of the inference server, and where its metrics page is."""

from __future__ import annotations

import pytest
from support.openai_front import DESCRIPTION, parse

from inflight_client.address import parse_address
from inflight_client.errors import InvalidArgument
from inflight_openai.prompts import make_prompt_reader
from inflight_openai.triton_client import (
    MetricsPage,
    make_calls,
    with_histograms,
    with_lora_requests,
)
from inflight_protocol import INPUT_BY_NAME, OUTPUT_BY_NAME

SERVER = parse_address("10.0.0.1:9001", "grpc")


def test_every_prompt_is_a_call() -> None:
    body = {"model": "demo", "prompt": ["1", "2"], "n": 2, "logprobs": 0, "stream": True}
    request = parse(make_prompt_reader(DESCRIPTION, None, None), body)
    calls = make_calls(request, "id")
    assert [call.request_id for call in calls] == ["id-0", "id-1"]
    for call in calls:
        assert set(call.values) <= set(INPUT_BY_NAME)
        assert set(call.outputs) <= set(OUTPUT_BY_NAME)
        assert call.values["streaming"] is True
        assert "sequence_index" in call.outputs


@pytest.mark.parametrize("url", ["8002", "ftp://a/b", "http://"])
def test_an_invalid_metrics_url_is_named(url: str) -> None:
    with pytest.raises(InvalidArgument, match="--metrics-url"):
        MetricsPage(url, SERVER)


@pytest.mark.parametrize("given", [None, "", "https://m/metrics"])
def test_the_metrics_page_is_the_server_s_by_default(given: str | None) -> None:
    wanted = "http://10.0.0.1:8002/metrics" if given is None else given
    assert MetricsPage(given, SERVER).url == wanted


def test_names_of_adapters_in_labels() -> None:
    """As Prometheus escapes them; without labels the page is as it was."""
    labels = {"max_lora": "8", "running_lora_adapters": 'a"\\\n', "waiting_lora_adapters": ""}
    page = with_lora_requests("x 1\n", labels)
    series = r'{max_lora="8",running_lora_adapters="a\"\\\n",waiting_lora_adapters=""}'
    assert page.startswith("x 1\n# HELP vllm:lora_requests_info ")
    assert f"\nvllm:lora_requests_info{series} " in page
    assert page.endswith("\n")
    assert with_lora_requests("x 1\n", {}) == "x 1\n"


def test_three_counters_are_shown_as_a_histogram() -> None:
    """And once more under the name that older dashboards know."""
    name, older = "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"
    counters = (
        "# TYPE x counter\nx 1\n"
        "# HELP N_bucket Gaps\n# TYPE N_bucket counter\n"
        'N_bucket{m="a",le="+Inf"} 2\nN_bucket{m="a",le="0.5"} 1\n'
        '# HELP N_sum Gaps\n# TYPE N_sum counter\nN_sum{m="a"} 3.5\n'
        '# HELP N_count Gaps\n# TYPE N_count counter\nN_count{m="a"} 2\n'
        "# TYPE N_bytes gauge\nN_bytes 2\n"
    )
    histogram = (
        "# HELP N Gaps\n# TYPE N histogram\n"
        'N_bucket{m="a",le="0.5"} 1\nN_bucket{m="a",le="+Inf"} 2\n'
        'N_sum{m="a"} 3.5\nN_count{m="a"} 2\n'
    )
    others = "# TYPE x counter\nx 1\n# TYPE N_bytes gauge\nN_bytes 2\n"
    wanted = (others + histogram).replace("N", name) + histogram.replace("N", older)
    assert with_histograms(counters.replace("N", name)) == wanted
