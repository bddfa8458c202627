"""The demo's data: the same bytes each time, held-out rows that share nothing, right answers."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "demo" / "make_data.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_make_data", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = load_script()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    demo.main(["--out", str(folder), "--train", "300", "--eval", "100", "--seed", "0"])
    return folder


def conversations(path: Path) -> list[tuple[str, dict[str, object]]]:
    """(sentence, record) of each row."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        user, assistant = json.loads(line)["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        found.append((user["content"], json.loads(assistant["content"])))
    return found


def test_the_same_arguments_give_the_same_bytes(data: Path, tmp_path: Path) -> None:
    demo.main(["--out", str(tmp_path), "--train", "300", "--eval", "100", "--seed", "0"])
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (data / name).read_bytes()


def test_another_seed_gives_other_rows(data: Path, tmp_path: Path) -> None:
    demo.main(["--out", str(tmp_path), "--train", "20", "--eval", "20", "--seed", "1"])
    seen = {sentence for sentence, _ in conversations(data / "train.jsonl")}
    assert not seen & {sentence for sentence, _ in conversations(tmp_path / "train.jsonl")}


def test_rows_are_as_many_as_asked_for_and_all_different(data: Path) -> None:
    for name, count in (("train.jsonl", 300), ("eval.jsonl", 100)):
        sentences = [sentence for sentence, _ in conversations(data / name)]
        assert len(sentences) == len(set(sentences)) == count


def said_date(sentence: str, day_month: str) -> bool:
    """Whether the sentence names this day in one of the forms that people use."""
    day, short = day_month.split()
    month = next(name for name in demo.MONTHS if name[:3] == short)
    months, days = rf"{month[:3]}({month[3:]})?", rf"{day}(st|nd|rd|th)?"
    pattern = rf"\b({days} (of )?{months}|{months} {days})\b"
    return re.search(pattern, sentence) is not None


def said_quantity(sentence: str, qty: int) -> bool:
    words = dict(enumerate(demo.NUMBER_WORDS, start=2))
    return re.search(rf"\b({qty}|{words.get(qty, qty)})\b", sentence) is not None


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_every_answer_can_be_read_off_its_sentence(data: Path, name: str) -> None:
    for sentence, record in conversations(data / name):
        assert tuple(record) == demo.KEYS
        assert all(str(record[key]) in sentence for key in ("name", "item", "city"))
        assert said_date(sentence, str(record["date"])), sentence
        assert isinstance(record["qty"], int) and said_quantity(sentence, record["qty"]), sentence


def test_answers_have_one_form(data: Path) -> None:
    for line in (data / "eval.jsonl").read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)["messages"][-1]["content"]
        assert answer == json.dumps(json.loads(answer), separators=(",", ":"))


def test_held_out_words_are_in_no_training_row(data: Path) -> None:
    held_out, seen = demo.words(held_out=True), demo.words(held_out=False)
    text = " ".join(sentence for sentence, _ in conversations(data / "train.jsonl"))
    for field in ("first_names", "surnames", "kinds", "things", "cities"):
        ours, theirs = getattr(held_out, field), getattr(seen, field)
        assert len(ours) >= 10 and len(theirs) >= 3 * len(ours) - 3
        assert not [word for word in ours if re.search(rf"\b{word}\b", text)], field


def test_held_out_dates_and_distractors_are_in_no_training_row(data: Path) -> None:
    held_out, seen = demo.words(held_out=True), demo.words(held_out=False)
    assert not set(held_out.dates) & set(seen.dates)
    assert not set(held_out.distractors) & set(seen.distractors)
    dates = {record["date"] for _, record in conversations(data / "train.jsonl")}
    assert not dates & {record["date"] for _, record in conversations(data / "eval.jsonl")}


def phrased_by(template: str, sentence: str) -> bool:
    words = re.split(r"\{\w+\}", template)
    return re.search(".+".join(re.escape(part) for part in words), sentence) is not None


def test_odd_held_out_rows_are_phrased_in_ways_unseen_in_training(data: Path) -> None:
    unseen = demo.templates(held_out=True)
    assert not set(unseen) & set(demo.templates(held_out=False))
    for sentence, _ in conversations(data / "train.jsonl"):
        assert not any(phrased_by(template, sentence) for template in unseen), sentence
    odd = conversations(data / "eval.jsonl")[1::2]
    right = [any(phrased_by(template, sentence) for template in unseen) for sentence, _ in odd]
    assert sum(right) >= 0.7 * len(right)  # the rest carry a misspelling


def test_a_distractor_never_repeats_a_value_of_the_order(data: Path) -> None:
    for sentence, record in conversations(data / "eval.jsonl"):
        assert all(sentence.count(str(record[key])) == 1 for key in ("name", "item", "city"))
