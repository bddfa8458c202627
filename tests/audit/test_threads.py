"""Work in threads keeps its order, its numbers and its errors."""

import pytest
import torch

from hirank.audit.threads import in_threads


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def test_results_come_in_order_and_are_the_same_to_the_bit(threads: int):
    matrices = [torch.randn(80 + i, 30, dtype=torch.float64) for i in range(12)]
    found = list(in_threads(torch.linalg.svdvals, matrices))
    torch.set_num_threads(1)
    alone = [torch.linalg.svdvals(matrix) for matrix in matrices]
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_an_error_ends_it(threads: int):
    begun = []

    def look(number: int) -> int:
        begun.append(number)
        if number == 2:
            raise ValueError("two")
        return number

    with pytest.raises(ValueError, match="two"):
        list(in_threads(look, range(1000)))
    assert 2 in begun
