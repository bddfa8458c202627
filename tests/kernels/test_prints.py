"""One number a set of tensors: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from hirank.kernels._triton import HAS_TRITON, interpreting
from hirank.kernels.prints import PrintTable, key_of, printable

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and (torch.cuda.is_available() or interpreting())),
    reason="needs a GPU, or TRITON_INTERPRET=1 (make test runs both)",
)
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]


def make(device):
    draw = torch.Generator().manual_seed(2)

    def random(dtype, *shape):
        return (torch.rand(shape, generator=draw) * 200).to(dtype).to(device)

    return [
        [(random(dtype, 20, 300), None), (random(torch.uint8, 9001, 1), 64), (random(dtype, 1), 8)]
        for dtype in DTYPES
    ]


def test_a_set_has_the_same_print_in_any_table(device):
    sets = make(device)
    together = PrintTable(sets).prints().tolist()
    assert together == [PrintTable([given]).prints().item() for given in sets]
    assert together == PrintTable(sets).prints().tolist()
    assert len(set(together)) == len(sets)


@pytest.mark.parametrize("entry", [0, 1, 5000, 5999])
def test_every_entry_shows(entry, device):
    sets = make(device)
    table = PrintTable(sets)
    before = table.prints()
    for i, given in enumerate(sets):
        tensor = given[0][0].view(-1)
        kept = tensor[entry].clone()
        tensor[entry] += 2
        changed = (table.prints() != before).tolist()
        assert changed == [j == i for j in range(len(sets))]
        tensor[entry] = kept
    assert torch.equal(table.prints(), before)


def test_entries_that_change_places_show(device):
    sets = make(device)
    table = PrintTable(sets)
    before = table.prints()
    for given in sets:
        given[0][0].copy_(given[0][0].flip(0))
    assert (table.prints() != before).all()


def test_of_a_sample_only_some_entries_show(device):
    sets = make(device)
    table = PrintTable(sets)
    before = table.prints()
    sets[0][1][0][0] ^= 1
    sets[1][1][0][1] ^= 1
    assert (table.prints() != before).tolist() == [True, False, False, False]


def test_what_a_table_is_built_on(device):
    given = make(device)[0]
    moved = [(t.clone(), most) for t, most in given]
    assert key_of(given) == key_of(list(given)) != key_of(moved)
    assert printable([t for t, _ in given])
    assert not printable([given[0][0].t(), given[1][0]])
    empty = PrintTable([[(torch.empty(0, device=device), None)]])
    assert empty.prints().tolist() == [0]
