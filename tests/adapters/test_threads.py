"""Threads that share a model, each in a dtype of its own, never meet the other's norm."""

import sys
import threading

import pytest
import torch

from adapters.setups import Lin, fresh_norm, layer_of, norm_in_use, perturb, wrap
from hirank.adapters.gain import NormCache
from hirank.adapters.groups import Family
from hirank.kernels._triton import interpreting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE = interpreting() or DEVICE == "cuda"


@pytest.fixture(autouse=True)
def threads_that_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_all(*works) -> None:
    """Run them at once; what one of them raises is raised here."""
    failures = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def asking(cache, weights, dtype, rounds):
    W, A, B, s = weights
    wide = [t.detach().to(dtype).double() for t in (A, B)]
    exact = (W.detach().double() + s * wide[1] @ wide[0]).norm(dim=1)

    def work():
        for _ in range(rounds):
            found = cache.norm(W, A, B, s, dtype).double()
            torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)

    return work


# fp16, as Triton's interpreter rounds to bf16 towards zero
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16)] * 2 + [(torch.float16,) * 4])
def test_d12_every_thread_gets_the_norm_of_its_dtype(dtypes):
    weights = (
        torch.randn(40, 24, device=DEVICE), torch.randn(4, 24, device=DEVICE),
        torch.randn(40, 4, device=DEVICE), 2.0,
    )  # fmt: skip
    cache = NormCache(lambda: weights)
    rounds = 5 if interpreting() else 200
    run_all(*(asking(cache, weights, dtype, rounds) for dtype in dtypes))
    assert cache.computed == len(set(dtypes)) or not TABLE


@pytest.mark.skipif(interpreting(), reason="the interpreter is too slow for it")
def test_threads_under_different_autocast_agree_with_themselves_alone():
    model = perturb(wrap(Lin(24, 16).to(DEVICE))).eval()
    x = torch.randn(3, 24, device=DEVICE)

    def forward(half):
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            return model(x)

    expected = {half: forward(half) for half in (False, True)}

    def work(half):
        for _ in range(100):
            assert torch.equal(forward(half), expected[half])

    run_all(*(lambda half=half: work(half) for half in (False, True, False, True)))


@pytest.mark.skipif(not TABLE, reason="needs a GPU, or TRITON_INTERPRET=1")
class TestTheTable:
    def test_d12_a_new_thread_begins_with_a_look_at_the_weights(self):
        model = perturb(wrap(Lin(24, 16).to(DEVICE)))
        layer = layer_of(model)
        norm_in_use(layer)
        layer.lora_A["default"].weight.data[1, 2] += 1.0
        found = []
        run_all(lambda: found.append(norm_in_use(layer).clone()))
        torch.testing.assert_close(found[0].double(), fresh_norm(layer), rtol=1e-5, atol=0)

    def test_d12_each_thread_refreshes_once_a_pass(self):
        family, caches, weights = Family(), [], []
        for _ in range(3):
            own = (torch.randn(8, 16, device=DEVICE), torch.randn(2, 16, device=DEVICE),
                   torch.randn(8, 2, device=DEVICE), 1.0)  # fmt: skip
            weights.append(own)
            caches.append(NormCache(lambda own=own: own, family=family))
        turns = threading.Barrier(2)

        def work():
            for _ in range(2):
                for cache, own in zip(caches, weights, strict=True):
                    turns.wait()
                    cache.norm(*own, torch.float32)

        run_all(work, work)
        group = caches[0].members[torch.float32].group
        assert list(group.last.values()) == [len(caches) - 1] * 2  # each thread has its own place

    def test_d12_all_dtypes_are_kept_at_once(self):
        """Going back and forth between dtypes builds no table and computes nothing again."""
        model = perturb(wrap(Lin(24, 16).to(DEVICE)))
        layer = layer_of(model)
        cache, base = layer._hirank_norms["default"], layer.base_layer.weight
        weights = (base, layer.lora_A["default"].weight, layer.lora_B["default"].weight, 2.0)
        for _ in range(4):
            for dtype in (torch.float32, torch.float16):
                cache.norm(*weights, dtype)
        assert cache.computed == 2
