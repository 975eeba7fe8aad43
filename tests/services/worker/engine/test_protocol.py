"""Messages between a worker and its engine round-trip."""

from engine import Request, SamplingParams
from services.worker.engine.protocol import HEADER, Add, Done, Finished, Refused, decode, encode


def test_requests_round_trip() -> None:
    params = SamplingParams(max_tokens=3, temperature=0.5, stop=("a",), seed=2**40)
    requests = (
        Request(request_id="1", prompt="p", sampling=params, tenant="acme"),
        Request(request_id="2", messages=[{"role": "user", "content": "x"}], adapter="d", sampling=params),
        Request(request_id="3", prompt_token_ids=[1, 2], tenant="other"),
    )
    assert decode(encode(Add(requests))[HEADER.size :]) == Add(requests)


def test_results_round_trip() -> None:
    done = Done(
        (Finished("1", (1, 2), "t", "stop", 1, 0, 2, [{1: -0.5}, {2: -1.0}], 0.5, 1, 2),),
        (Refused("2", "failed", "why"),),
    )
    assert decode(encode(done)[HEADER.size :]) == done
