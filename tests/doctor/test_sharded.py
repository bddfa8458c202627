"""What lies elsewhere is not judged as if it were here."""

import torch
from accelerate import cpu_offload

from doctor.cases import named, trained, wrap
from hirank import diagnose


def test_empty_weights_of_a_sharded_model(tmp_path):
    """ZeRO-3 leaves parameters without entries between calls."""
    trained(use_dora=True).save_pretrained(tmp_path)
    model = wrap(use_dora=True)
    for p in model.parameters():
        p.data = p.data.new_empty(0)
    report = diagnose(model, adapter_dir=tmp_path, config={"learning_rate": 1e-4})
    assert not report, str(report)


def test_weights_that_accelerate_keeps_on_the_host():
    model = wrap()
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert any(p.is_meta for p in named(model, "lora_A"))
    assert not diagnose(model)
