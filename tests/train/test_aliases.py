"""The words of other trainers for a low-rank method, and what they contradict."""

import pytest

from hirank.errors import HirankError
from hirank.train.aliases import REFUSED
from hirank.train.config import load_config

PLAIN = ["model=some/model", "data=rows.jsonl"]


def method_of(*overrides: str):
    return load_config(None, [*PLAIN, *overrides]).method


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("galore_rank=8", "r", 8),
        ("rank=8", "r", 8),
        ("update_proj_gap=50", "gap", 50),
        ("galore_update_proj_gap=50", "gap", 50),
        ("galore_update_interval=50", "gap", 50),
        ("galore_scale=2.0", "scale", 2.0),
        ("scale=2.0", "scale", 2.0),
        ("proj_type=std", "sides", "short"),
        ("galore_proj_type=reverse_std", "sides", "long"),
        ("proj_type=full", "sides", "two"),
        ("galore_target=all", "target_modules", "all-linear"),
        ("galore_target='q_proj,v_proj'", "target_modules", ["q_proj", "v_proj"]),
        ("galore_target_modules=[mlp]", "target_modules", ["mlp"]),
        ("optim_target_modules=[attn, mlp]", "target_modules", ["attn", "mlp"]),
        ("galore_layerwise=true", "step_in_backward", True),
        ("galore_optim_per_parameter=true", "step_in_backward", True),
        ("galore_cos_threshold=0.4", "lazy", 0.4),
        ("galore_gamma_proj=2", "lazy_growth", 2.0),
        ("galore_queue_size=5", "lazy_patience", 5),
    ],
)
def test_names_of_other_trainers(word, field, value):
    place = "method." if word.partition("=")[0] in ("scale", "rank") else ""
    assert getattr(method_of("method=galore", f"{place}{word}"), field) == value


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("apollo_rank=8", "r", 8),
        ("apollo_update_interval=7", "gap", 7),
        ("apollo_scale_type=tensor", "scale_by", "tensor"),
        ("apollo_scale=16", "scale", 4.0),  # apollo_torch multiplies by the root
    ],
)
def test_names_of_apollo(word, field, value):
    assert getattr(method_of("method=apollo", word), field) == value


@pytest.mark.parametrize(
    ("words", "name", "changes"),
    [
        (["use_galore=true"], "galore", {}),
        (["use_apollo=true"], "apollo", {}),
        (["use_galore=false"], "dora", {}),
        (["optim=galore_adamw"], "galore", {}),
        (["optim=galore_adamw_8bit"], "galore", {"state": "int8"}),
        (["optim=galore_adamw_layerwise"], "galore", {"step_in_backward": True}),
        (["optim=apollo_adamw_layerwise"], "apollo", {"step_in_backward": True}),
    ],
)
def test_switches_and_optimisers_name_the_method(words, name, changes):
    method = method_of(*words)
    assert method.name == name
    assert {key: getattr(method, key) for key in changes} == changes


def written(tmp_path, **tree):
    path = tmp_path / "c.yaml"
    lines = [f"{key}: {value}\n" for key, value in tree.items()]
    path.write_text("model: some/model\ndata: rows.jsonl\n" + "".join(lines))
    return path


def test_a_switch_beside_full_fine_tuning_is_one_method(tmp_path):
    path = written(tmp_path, finetuning_type="full", use_galore="true", galore_rank=4)
    method = load_config(path).method
    assert (method.name, method.r) == ("galore", 4)


@pytest.mark.parametrize(
    "tree",
    [
        {"finetuning_type": "lora", "use_galore": "true"},
        {"method": "dora", "use_galore": "true"},
        {"method": "{name: lora}", "optim": "galore_adamw"},
        {"use_apollo": "true", "use_galore": "true"},
    ],
)
def test_two_methods_at_once_are_refused(tmp_path, tree):
    with pytest.raises(HirankError, match=r"ask for two methods; give one\.$"):
        load_config(written(tmp_path, **tree))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_with_the_reason(name):
    with pytest.raises(HirankError, match=rf"{name} is no setting here: .*leave it out\.$"):
        load_config(None, [*PLAIN, f"{name}=x.json"])


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(HirankError, match=r"method\.gab; the nearest known one is method\.gap\."):
        method_of("method=galore", "method.gab=3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=galore", "method.dropout=0.1"], "method.dropout belongs to an adapter"),
        (["method=fira", "lora_alpha=16"], "method.alpha belongs to an adapter"),
        (["method=apollo", "method.modules_to_save=[lm_head]"], "method.modules_to_save belongs"),
        (["method=lora", "galore_scale=2"], "method.scale belongs to galore and its kind, not to"),
        (["method=full", "galore_layerwise=true"], "method.step_in_backward belongs to galore"),
    ],
)
def test_options_of_another_kind_of_method_are_refused(words, said):
    with pytest.raises(HirankError) as caught:
        method_of(*words)
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith("leave it out.") and "{" not in str(caught.value)


def test_a_side_that_nobody_knows_is_refused():
    with pytest.raises(HirankError, match="method.sides is 'up'.*short, long, left, right, two"):
        method_of("method=galore", "method.sides=up")
