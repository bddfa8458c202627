"""What is found when something must fit, and what is said about it."""

from dataclasses import replace
from typing import Any

import pytest

from hirank.errors import HirankError
from hirank.plan.catalogue import CATALOGUE
from hirank.plan.changes import changes_of
from hirank.plan.closed import closed_form
from hirank.plan.compare import comparison
from hirank.plan.fit import advice, fit, fits, largest
from hirank.plan.inventory import read_shape
from hirank.plan.setting import Setting
from hirank.plan.sizes import CARDS, read_memory

GIB = 2**30
Q7 = read_shape(CATALOGUE["qwen2.5-7b"].config, "qwen2.5-7b")


@pytest.mark.parametrize(
    ("values", "size", "changed"),
    [
        ({"method": "dora", "batch": 8, "sequence": 2048}, 40, {"checkpointing"}),
        (
            {"method": "lora", "loss": "plain", "sequence": 8192, "checkpointing": True},
            24,
            {"loss"},
        ),
        ({"method": "dora-peft"}, 24, {"method"}),
        ({"method": "dora", "batch": 2}, 24, {"batch", "accumulation"}),
        ({"method": "lora"}, 12, {"method", "checkpointing"}),
    ],
)
def test_as_little_as_possible_is_changed(values: dict[str, Any], size: int, changed: set[str]):
    setting = Setting("q", **values)
    found = fit(setting, Q7, size * GIB)
    assert found is not None
    told = {name for made, _ in found.steps for name in made.values}
    assert told >= {n for n, v in vars(found.setting).items() if v != getattr(setting, n)}
    assert told - {"base_dtype"} == changed
    assert fits(found.ledger, size * GIB)


def test_no_change_is_superfluous():
    setting = Setting("q", method="full", base_dtype="fp32", batch=8)
    found = fit(setting, Q7, 80 * GIB)
    assert found is not None and len(found.steps) > 1
    for left_out, _ in found.steps:
        made = setting
        for change, _ in found.steps:
            made = made if change is left_out else replace(made, **change.values)
        assert not fits(closed_form(made, Q7), 80 * GIB)


def test_the_batch_of_a_step_stays_as_it_is():
    setting = Setting("q", method="dora", batch=6, checkpointing=True, sequence=4096)
    found = fit(setting, Q7, 20 * GIB)
    assert found is not None
    assert found.setting.batch * found.setting.accumulation == 6


def test_what_fits_is_left_alone():
    found = fit(Setting("q"), Q7, 80 * GIB)
    assert found is not None and found.steps == ()


def test_nothing_makes_a_70b_fit_into_8_gib():
    shape = read_shape(CATALOGUE["llama-3.3-70b"].config, "l")
    assert fit(Setting("l"), shape, 8 * GIB) is None


@pytest.mark.parametrize("what", ["seq", "batch", "rank"])
def test_the_largest_fits_and_one_more_does_not(what: str):
    setting = Setting("q", method="dora", checkpointing=True)
    found = largest(what, setting, Q7, 24 * GIB)
    name = {"seq": "sequence"}.get(what, what)
    inside, outside = (replace(setting, **{name: n}) for n in (found, found + 1))
    assert fits(closed_form(inside, Q7), 24 * GIB)
    assert not fits(closed_form(outside, Q7), 24 * GIB)


def test_a_rank_is_at_most_the_shorter_side():
    assert largest("rank", Setting("q"), Q7, 500 * GIB) == 512  # k_proj and v_proj


def test_nothing_fits_where_the_weights_do_not():
    assert largest("seq", Setting("q"), Q7, 8 * GIB) == 0


@pytest.mark.parametrize(
    ("what", "method", "said"),
    [("tokens", "lora", "seq, batch or rank"), ("rank", "full", "no rank")],
)
def test_what_has_no_largest(what: str, method: Any, said: str):
    with pytest.raises(HirankError, match=said):
        largest(what, Setting("q", method=method), Q7, 80 * GIB)


# What is said.


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch": 8, "sequence": 2048}, "Activations kept, not rank, are"),
        ({"batch": 8, "sequence": 2048}, "checkpointing = true saves"),
        ({"loss": "plain", "sequence": 8192, "checkpointing": True}, "loss = trl saves"),
    ],
)
def test_advice_names_what_is_largest_and_what_helps(values: dict[str, Any], said: str):
    setting = Setting("q", **values)
    assert said in advice(setting, Q7, closed_form(setting, Q7))


def test_every_change_says_what_it_costs_and_stays_possible():
    for name in ("lora", "dora-peft", "full", "galore", "qlora"):
        method: Any = name
        changes = list(changes_of(Setting("q", method=method, batch=4, rank=64)))
        assert changes
        assert all(made.cost and made.text for _, made in changes)


def test_a_comparison_has_every_method_once():
    rows = comparison(Setting("q", rank=32), Q7)
    names = [row.name for row in rows]
    assert len(set(names)) == len(names) == 12
    assert {row.setting.rank for row in rows if row.setting.is_adapter} == {32}
    sizes = {row.name: row.ledger.allocated for row in rows}
    assert sizes["qdora"] < sizes["dora"] < sizes["dora-peft"]
    assert sizes["qgalore"] < sizes["galore"] < sizes["full, fp32 weights"]


# Sizes.


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("80GB", 80 * 10**9),
        ("16384MiB", 16 * GIB),
        ("1.5 TiB", 1536 * GIB),
        ("17179869184", 16 * GIB),
        ("H100", CARDS["h100"] * 2**20),
        ("A100-80GB", CARDS["a100-80gb"] * 2**20),
    ],
)
def test_memory_as_people_write_it(text: str, size: int):
    assert read_memory(text) == size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("24", "is 24GiB meant"),
        ("24GiBB", "write 24GiB"),
        ("24 gigs", "write 24"),
        ("h10", "nearest known card is h100"),
        ("much", "write 24GiB or 80GB"),
        ("-3GiB", "no size of memory"),
        ("0GiB", "less than 1 MiB"),
        ("", "no size of memory"),
    ],
)
def test_what_is_no_memory(text: str, said: str):
    with pytest.raises(HirankError, match=said):
        read_memory(text)


def test_beyond_the_search_changes_are_made_until_it_fits(monkeypatch: pytest.MonkeyPatch):
    """And none that later ones do not build on is there without need."""
    monkeypatch.setattr("hirank.plan.fit._TRIES", 5)
    start = Setting("q", method="full", base_dtype="fp32", batch=8, loss="plain", step="loop")
    found = fit(start, Q7, 12 * GIB)
    assert found is not None
    assert fits(found.ledger, 12 * GIB)
    assert len(found.steps) < 10
    last = start
    for made, _ in found.steps[:-1]:
        last = replace(last, **made.values)
    assert not fits(closed_form(last, Q7), 12 * GIB)
    assert fit(start, Q7, GIB) is None
