"""The order of the data: a function of (seed, epoch), shared out by batches, continued where it stopped."""

import pytest
import torch
from torch.utils.data import BatchSampler

from noctowl.data.order import Order


def batches(order: Order) -> list[list[int]]:
    return list(BatchSampler(order, order.batch_size, drop_last=False))


def test_a_function_of_seed_and_epoch():
    order = Order(50, batch_size=8, seed=3)
    order.set_epoch(4)
    wanted = list(order)
    assert sorted(wanted) == list(range(50))
    torch.manual_seed(99)
    again = Order(50, batch_size=8, seed=3)
    for epoch in range(5):  # whatever was drawn before
        again.set_epoch(epoch)
        last = list(again)
    assert last == wanted
    others = [Order(50, batch_size=8, seed=seed) for seed in (3, 4)]
    assert list(others[0]) != wanted
    assert list(others[0]) != list(others[1])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 9, 16, 17])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_processes_take_batches_in_turn(size, world_size):
    """Round by round the processes see what one process sees in consecutive batches; all have as many batches."""
    alone = batches(Order(size, batch_size=3, seed=1))
    shares = [Order(size, batch_size=3, seed=1, rank=r, world_size=world_size) for r in range(world_size)]
    cut = [batches(share) for share in shares]
    assert len({len(share) for share in cut}) == 1
    together = [batch for turn in zip(*cut) for batch in turn]
    assert together[: len(alone)] == alone
    assert all(repeated == alone[0] for repeated in together[len(alone) :])
    assert [len(share) for share in shares] == [sum(map(len, c)) for c in cut]
    assert all(share.batches == len(alone) for share in shares)


def test_an_epoch_is_continued_at_its_next_batch():
    order = Order(20, batch_size=3, seed=1)
    order.set_epoch(2)
    whole = batches(order)
    order.set_epoch(3)
    following = batches(order)
    continued = Order(20, batch_size=3, seed=1)
    continued.continue_at(2, 4)
    assert batches(continued) == whole[4:]
    assert len(continued) == 20
    continued.set_epoch(3)
    assert batches(continued) == following
