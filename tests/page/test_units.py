"""Numbers read as people write them."""

import pytest

from hirank.page.units import bytes_text, count_text, duration_text, percent_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (8.44, "8.4 s"), (59.94, "60 s"), (60, "1 min 00 s"), (252, "4 min 12 s"),
     (3599.6, "1 h 00 min"), (7500, "2 h 05 min")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1, "100 %"), (0.125, "12.5 %"), (1999 / 2000, "99.9 %"), (0.00002, "0.002 %")],
)
def test_shares(share: float, text: str) -> None:
    assert percent_text(share) == text


def test_bytes_and_counts() -> None:
    assert [bytes_text(n) for n in (5e6, 1.916e9)] == ["5 MB", "1.92 GB"]
    assert [count_text(n) for n in (812, 19_500, 134_515_008, 7_615_616_512)] == [
        "812", "19.5 k", "134.5 M", "7.6 B",
    ]  # fmt: skip
