"""Numbers as people read them: durations, bytes, shares, counts."""

__all__ = ["bytes_text", "count_text", "duration_text", "percent_text"]


def duration_text(seconds: float) -> str:
    """`8.4 s`, `4 min 12 s`, `2 h 05 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def bytes_text(count: float) -> str:
    """Decimal units, as in `1.92 GB` (10^9 bytes)."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB"


def percent_text(share: float) -> str:
    """A share of 1 in percent: `0 %`, `12.5 %`, `100 %`.

    Only a true 0 or 1 is written as such: 1999 of 2000 is 99.9 %, and 1 of 50,000 is 0.002 %.
    """
    percent = 100 * share
    if 0 < percent < 0.1:
        return f"{percent:.1g} %"
    if 99.9 < percent < 100:
        return "99.9 %"
    return f"{percent:.1f}".removesuffix(".0") + " %"


def count_text(count: float) -> str:
    """`812`, `19.5 k`, `134.5 M`, `7.6 B`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"
