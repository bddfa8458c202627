"""Layers side by side, one thread each.

The matrices of one layer are too small to share: on a machine that is busy with something else QR
and SVD on two threads are several times slower than on one, since each step waits for both. Whole
layers go their own ways, and the numbers do not depend on how many threads there are.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["in_threads"]

Item = TypeVar("Item")
Found = TypeVar("Found")


def in_threads(look: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[Found]:
    """`look` at each item, as many at once as PyTorch has threads, in the order of the items.

    While it runs PyTorch has one thread for each operation. What `look` raises is raised here,
    and nothing that has not begun is begun then.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(look, items)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
