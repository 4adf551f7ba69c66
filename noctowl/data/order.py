"""The order in which training items are seen: a function of seed and epoch, shared out between processes by batches."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class Order(Sampler[int]):
    """A permutation per epoch, cut into batches that the processes take in turn.

    Process r of W takes the batches r, r + W, r + 2W, …: W processes see in one round what one process sees in W
    consecutive batches. Every process yields the same number of batches; one that has none left repeats the epoch's
    first, which the training step weighs with 0.

    Args:
        size: items.
        batch_size: of one process; the loader must batch by the same number and keep the last incomplete batch.
        seed: of all permutations; epoch e is permuted by (seed, e), whatever was drawn before.
        rank, world_size: of this process.

    Attributes:
        batches: of an epoch, over all processes, without repetitions.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.size, self.batch_size, self.seed, self.rank, self.world_size = size, batch_size, seed, rank, world_size
        self.epoch = 0
        self._started = (0, 0)
        self.batches = -(-size // batch_size)
        self.rounds = -(-self.batches // world_size)

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch

    def continue_at(self, epoch: int, batch: int) -> None:
        """Begin in this epoch at this batch (counted in batches of one process)."""
        self.epoch = epoch
        self._started = (epoch, batch)

    def permutation(self) -> np.ndarray:
        """int64 [size], of the present epoch."""
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.size)

    def __iter__(self) -> Iterator[int]:
        order = self.permutation()
        first = self._started[1] if self.epoch == self._started[0] else 0
        for turn in range(first, self.rounds):
            begin = self._begin(turn)
            yield from order[begin : begin + self.batch_size].tolist()

    def __len__(self) -> int:
        """Items of this process in a whole epoch, also in one that is continued."""
        if not self.rounds:
            return 0
        return (self.rounds - 1) * self.batch_size + min(self.batch_size, self.size - self._begin(self.rounds - 1))

    def _begin(self, turn: int) -> int:
        index = turn * self.world_size + self.rank
        return index * self.batch_size if index < self.batches else 0
