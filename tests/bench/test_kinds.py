"""The suite `layer` over embeddings and convolutions, with and without dropout."""

import json

import pytest

from hirank.bench.options import main

SMALL = "layer --rank 4 --tokens 16 --calls 1 --threads 1 --repeats 1 --warmup 0 --cpu"
LACKING = {"embedding": {"base", "dense-dora"}, "conv2d": {"dense-dora"}, "linear": set()}
ARMS = {"base", "peft-lora", "peft-dora", "dense-dora", "hirank-lora", "hirank-dora"}


@pytest.mark.parametrize("kind", LACKING)
def test_every_kind_is_measured_and_judged(kind, tmp_path):
    said = []
    words = f"{SMALL} --shape 24x16 --kind {kind} --dropout 0,0.2 --out {tmp_path}"
    assert main(words.split(), said.append) == 0, said
    (file,) = tmp_path.rglob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["arm"] for row in rows} == ARMS - LACKING[kind]
    assert {row["settings"]["dropout"] for row in rows} == {0.0, 0.2}
    assert not any("DISAGREES" in line for line in said)
    judged = [row for row in rows if row["arm"] == "hirank-dora"]
    assert all(row["metrics"]["agreement"]["agrees"] for row in judged)


@pytest.mark.parametrize(
    ("given", "words"),
    [("--kind conv4d", "--kind got 'conv4d'"), ("--kind conv2d --base nf4", "only --kind linear")],
)
def test_what_there_is_not(given, words, tmp_path):
    said = []
    code = main(f"{SMALL} --shape 8x8 {given} --out {tmp_path}".split(), said.append)
    assert code == 2 and any(words in line for line in said)
