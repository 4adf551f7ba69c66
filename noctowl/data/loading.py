"""A data loader through which the project's own errors come back from worker processes as they were raised.

torch raises a worker's exception anew with the worker's traceback in its message, and as a RuntimeError where it cannot
build one: a missing image would look like a fault of the program. Here errors travel as values and are raised by the
process that trains or evaluates.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset, default_collate

from noctowl.errors import NoctowlError

T = TypeVar("T")


class _Guarded(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any]):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except NoctowlError as error:
            return error


class _Collate:
    def __init__(self, function: Callable[[list[Any]], Any]):
        self.function = function

    def __call__(self, items: list[Any]) -> Any:
        return next((item for item in items if isinstance(item, NoctowlError)), None) or self.function(items)


class Loader(DataLoader[T]):
    """Made by `make_loader`; raises the first error of a batch when that batch is asked for."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, NoctowlError):
                raise batch
            yield batch


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_loader(
    dataset: Dataset[Any], *, collate_fn: Callable[[list[Any]], Any] = default_collate, **options: Any
) -> Loader[Any]:
    """A DataLoader over a map-style data set; `options` are those of torch's. No more workers than usable CPUs."""
    options["num_workers"] = min(options.get("num_workers", 0), usable_cpus())
    return Loader(_Guarded(dataset), collate_fn=_Collate(collate_fn), **options)
