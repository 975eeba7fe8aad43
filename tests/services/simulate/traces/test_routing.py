"""Routing against Kafka's own client, and the spread of hot adapters."""

import numpy as np
from aiokafka.partitioner import murmur2 as reference
from hypothesis import given
from hypothesis import strategies as st

from services.simulate.traces.routing import Fleet, murmur2, partition_of, partitions_of, route


@given(st.binary(max_size=40))
def test_the_hash_is_that_of_kafka_clients(key: bytes) -> None:
    assert murmur2(key) == reference(key)


@given(st.binary(min_size=1, max_size=20), st.integers(1, 40), st.data())
def test_a_hot_key_keeps_its_own_partition_first(key: bytes, num_partitions: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, num_partitions))
    chosen = partitions_of(key, num_partitions, count)
    assert chosen[0] == partition_of(key, num_partitions)
    assert len(set(chosen)) == count
    assert set(chosen) <= set(range(num_partitions))
    assert partitions_of(key, num_partitions, max(1, count - 1)) == chosen[: max(1, count - 1)]


def test_an_adapter_meets_one_worker_and_a_hot_one_as_many_as_it_needs() -> None:
    keys = [f"acme/adapter-{number}" for number in range(100)]
    jobs = np.concatenate([np.zeros(900, np.int32), np.arange(1, 100, dtype=np.int32)]).astype(np.int32)
    rng = np.random.default_rng(0)
    alone = route(jobs, keys, Fleet(10), rng)
    assert len(set(alone[jobs == 0])) == 1
    spread = route(jobs, keys, Fleet(10, spread=4), rng)
    on_each = np.bincount(spread[jobs == 0], minlength=10)
    assert 2 <= np.count_nonzero(on_each) <= 4
    assert all(len(set(spread[jobs == number])) == 1 for number in range(1, 100))
    assert (spread[jobs != 0] == alone[jobs != 0]).all()


def test_jobs_without_a_key_meet_every_worker() -> None:
    workers = route(np.zeros(1000, np.int32), [None], Fleet(8), np.random.default_rng(1))
    assert np.bincount(workers, minlength=8).min() > 80
