"""The work list: exact, in order, and with a size that does not depend on the mix."""

import pytest
import torch

from engine.kernels.triton.launch import Launch
from engine.kernels.triton.plan import ANY, ONE, SEVERAL, Lengths, Plans, list_work
from tests.engine.kernels.cases import POPULARITIES, Shapes, adapter_tables, lora_batch, slots_by_popularity
from tests.engine.kernels.triton.grid.device import FP32, OnDevice, run_here


def expected_items(bounds: list[int], owners: list[int], block_m: int, lengths: Lengths = ANY) -> list[list[int]]:
    return [
        [owner, start, min(start + block_m, bounds[segment + 1])]
        for segment, owner in enumerate(owners)
        for start in range(bounds[segment], bounds[segment + 1], block_m)
        if owner >= 0 and lengths.fewest <= bounds[segment + 1] - bounds[segment] <= lengths.most
    ]


@pytest.mark.parametrize("block_m", [1, 16])
@pytest.mark.parametrize(
    ("lengths", "owners"),
    [([5, 0, 17, 40], [3, 1, -1, 0]), ([1] * 200, list(range(200))), ([0, 0], [0, 1]), ([300], [2]), ([33], [-1])],
)
def test_items_are_the_blocks_of_segments_with_an_owner(
    kernels: OnDevice, lengths: list[int], owners: list[int], block_m: int
) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    num_rows = int(bounds[-1])
    work = list_work(
        run_here,
        bounds.to(kernels.device),
        torch.tensor(owners, dtype=torch.int32, device=kernels.device),
        num_rows,
        block_m,
    )
    items = work.items[: work.capacity].tolist()
    expected = expected_items(bounds.tolist(), owners, block_m)
    assert [item[:3] for item in items[: len(expected)]] == expected
    assert all(item[0] == -1 for item in items[len(expected) :])


@pytest.mark.parametrize("block_m", [1, 16])
@pytest.mark.parametrize("lengths", [ONE, SEVERAL, Lengths(2, 17)])
@pytest.mark.parametrize(
    "segments",
    [[1, 40, 0, 1, 17, 2, 1], [1] * 150, [3] * 140, [1, 18] * 70],
    ids=["some", "ones", "threes", "many"],
)
def test_a_list_may_be_restricted_to_segments_of_some_lengths(
    kernels: OnDevice, segments: list[int], lengths: Lengths, block_m: int
) -> None:
    bounds = torch.tensor([0, *segments]).cumsum(0).to(torch.int32)
    work = list_work(run_here, bounds.to(kernels.device), None, int(bounds[-1]), block_m, lengths)
    items = work.items[: work.capacity].tolist()
    expected = expected_items(bounds.tolist(), list(range(len(segments))), block_m, lengths)
    assert [item[:3] for item in items[: len(expected)]] == expected
    assert all(item[0] == -1 for item in items[len(expected) :])


def test_the_capacity_of_a_list_is_the_maximum_over_all_mixes_of_its_lengths() -> None:
    bounds, started = torch.empty(33, dtype=torch.int32), list[Launch]()
    capacities = [list_work(started.append, bounds, None, 512, m, which).capacity for m, which in ((1, ANY), (1, ONE))]
    assert capacities == [512, 32]
    assert list_work(started.append, bounds, None, 512, 16, SEVERAL).capacity == 64


def test_a_segment_without_owners_owns_itself(kernels: OnDevice) -> None:
    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=kernels.device)
    work = list_work(run_here, bounds, None, 5, 1)
    assert work.items[: work.capacity, :2].tolist() == [[0, 0], [0, 1], [2, 2], [2, 3], [2, 4]]


def test_a_list_is_built_once_per_step_and_again_when_its_tensors_change(kernels: OnDevice) -> None:
    started: list[Launch] = []
    plans = Plans(started.append)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    for _ in range(3):
        plans.get(bounds, None, 5, 1)
    assert len(started) == 1
    plans.get(bounds, None, 5, 1, ONE)
    assert len(started) == 2
    bounds[1] = 3
    plans.get(bounds, None, 5, 1)
    plans.get(bounds.clone(), None, 5, 1)
    assert len(started) == 4


def test_the_grid_does_not_depend_on_the_adapters_in_the_batch() -> None:
    from engine.kernels.triton import TritonKernels

    tables = adapter_tables([(8,) * 7, (1,) * 7, (40,) * 7, (0,) * 7], Shapes(64, 64, 128), FP32)
    grids = set()
    for popularity in POPULARITIES:
        started: list[Launch] = []
        batch = lora_batch(tables, slots_by_popularity(popularity, 32, 4))
        segments = torch.cat([batch.segments, batch.segments[-1:].expand(8)])[:9].contiguous()
        slots = torch.cat([batch.segment_slots, batch.segment_slots[-1:].expand(8)])[:8].contiguous()
        kernels = TritonKernels(started.append, 90)
        kernels.lora_apply(torch.empty(32, 64), torch.empty(32, 64), (64,), type(batch)(tables, segments, slots), 1, 3)
        grids.add(tuple(launch.grid for launch in started))
    assert len(grids) == 1


def test_a_recorded_step_contains_the_launches_that_build_its_work_lists() -> None:
    """A step runs once before it is recorded, on the same tensors: only a new step rebuilds the lists."""
    from engine.kernels.triton import TritonKernels

    tables = adapter_tables([(8,) * 7, (1,) * 7], Shapes(64, 64, 128), FP32)
    batch, started = lora_batch(tables, [0, 1, 1]), list[Launch]()
    kernels = TritonKernels(started.append, 90)
    for _ in range(2):
        started.clear()
        kernels.begin_step()
        for _ in range(2):
            kernels.lora_apply(torch.empty(3, 64), torch.empty(3, 64), (64,), batch, 1, 3)
        assert [launch.name for launch in started] == ["list_items", "shrink", "expand", "shrink", "expand"]
