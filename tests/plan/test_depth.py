"""The peak of a deep model need not be where it is in the shallow ones."""

from collections import Counter

import pytest

from hirank.plan.depth import peaks, peaks_at
from hirank.plan.live import Moment


def moments(depth, *, kept=10, made=7, last=300):
    """A backward pass: activations fall, gradients rise, and a large gradient comes last."""
    found = [Moment("start", "back", Counter(kept=kept * depth, gradients=50))]
    for block in range(depth):
        for op in ("a", "b"):
            alive = kept * (depth - block)
            found.append(Moment(op, "back", Counter(kept=alive, gradients=made * (block + 1))))
    found.append(Moment("embedding", "back", Counter(gradients=made * depth + last)))
    return found


@pytest.mark.parametrize("depth", [1, 4, 80])
@pytest.mark.parametrize("sizes", [{}, {"made": 13}, {"last": 0}, {"kept": 0}], ids=str)
def test_the_peak_of_any_depth(depth, sizes):
    foretold = peaks_at(depth, moments(2, **sizes), moments(3, **sizes), (2, 3))
    seen = peaks(moments(depth, **sizes))
    assert foretold["back"].kinds == +seen["back"].kinds
    assert foretold["back"].op == seen["back"].op


def test_traces_of_other_phases_are_refused():
    with pytest.raises(ValueError, match="phases"):
        peaks_at(9, moments(2), [Moment("a", "forward", Counter())], (2, 3))
