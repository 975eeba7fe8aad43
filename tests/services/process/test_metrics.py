"""Observing a batch gives the same histogram as observing its values one by one."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from services.process.metrics import observe_all


@given(st.lists(st.floats(0, 20) | st.sampled_from([0.01, 0.1, 1.0, 10.0])))
def test_a_batch_counts_like_its_single_values(values: list[float]) -> None:
    pages = []
    for together in (True, False):
        registry = CollectorRegistry()
        histogram = Histogram("waits", "Waits.", buckets=(0.01, 0.1, 1, 10), registry=registry)
        if together:
            observe_all(histogram, values)
        else:
            for value in values:
                histogram.observe(value)
        page = generate_latest(registry).decode().splitlines()
        pages.append([line for line in page if "_created" not in line and "_sum" not in line])
    assert pages[0] == pages[1]
