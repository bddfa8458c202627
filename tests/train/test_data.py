"""Examples from files: formats told apart, bad rows told together, the split stable."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from helpers import chat_rows, write_jsonl
from hirank.errors import HirankError
from hirank.train.data import DataConfig, Example, Examples, Message, load_examples

PAIR = {"prompt": "q", "completion": "a"}


def config(*train: Path, **settings: Any) -> DataConfig:
    return DataConfig(train=list(train), **{"eval_fraction": 0.0, **settings})


def load(*train: Path, **settings: Any) -> Examples:
    return load_examples(config(*train, **settings))


def refusal(*train: Path, **settings: Any) -> str:
    with pytest.raises(HirankError) as caught:
        load(*train, **settings)
    return str(caught.value)


# Settings.


def test_one_path_or_a_list() -> None:
    assert DataConfig(train="a.jsonl").train == [Path("a.jsonl")]
    assert DataConfig(train=["a.jsonl", Path("b.csv")]).train == [Path("a.jsonl"), Path("b.csv")]
    assert DataConfig(train="a.jsonl", eval="b.jsonl").eval == [Path("b.jsonl")]


@pytest.mark.parametrize(
    "settings",
    [
        {"train": []},
        {"train": "a", "eval_fraction": 1.0},
        {"train": "a", "eval_fraction": -0.1},
        {"train": "a", "max_length": 1},
        {"train": "a", "limit": 0},
        {"train": "a", "format": "xml"},
        {"train": "a", "overflow": "split"},
        {"train": "a", "unknown": 1},
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DataConfig(**settings)


def test_unknown_target_column_names_the_nearest() -> None:
    with pytest.raises(ValidationError, match="'respons' is no known column; did you mean 'respon"):
        DataConfig(train="a", columns={"x": "respons"})


def test_every_setting_is_described_and_frozen() -> None:
    assert all(field.description for field in DataConfig.model_fields.values())
    with pytest.raises(ValidationError):
        DataConfig(train="a").seed = 1


# Files to examples.


def test_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": f"a\n{i}"} for i in range(3)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text(json.dumps({"data": rows}))
    lines = [f'{row["prompt"]},"{row["completion"]}"' for row in rows]
    (tmp_path / "a.csv").write_text("\n".join(["prompt,completion", *lines]))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    contents = {
        name: [example.content for example in load(tmp_path / name).train]
        for name in ("a.jsonl", "a.json", "b.json", "a.csv", "a.parquet")
    }
    assert all(content == contents["a.jsonl"] for content in contents.values()), contents
    assert contents["a.csv"][1] == (("user", "q1"), ("assistant", "a\n1"))


def test_conversations_from_parquet_and_csv(tmp_path: Path) -> None:
    rows = [{**row, "system": None} for row in chat_rows(2)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    cells = [json.dumps(row["messages"]).replace('"', '""') for row in rows]
    (tmp_path / "a.csv").write_text("messages\n" + "".join(f'"{cell}"\n' for cell in cells))
    one, other = load(tmp_path / "a.parquet").train, load(tmp_path / "a.csv").train
    assert [e.messages for e in one] == [e.messages for e in other]
    assert [e.source for e in one] == [f"{tmp_path}/a.parquet:row {i}" for i in (0, 1)]
    assert [e.source for e in other] == [f"{tmp_path}/a.csv:{i}" for i in (2, 3)]


def test_each_file_has_its_own_format(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "a.jsonl", chat_rows(2))
    other = write_jsonl(tmp_path / "b.jsonl", [PAIR])
    found = load(one, other)
    assert [(f.path, f.format, f.rows, f.bad) for f in found.counts.files] == [
        (one, "messages", 2, 0),
        (other, "prompt-completion", 1, 0),
    ]
    assert len(found.train) == 3 and found.eval == ()
    assert str(found.counts) == f"3 rows read, {one} as messages, {other} as prompt-completion"


def test_columns_are_renamed_and_win(tmp_path: Path) -> None:
    rows = [{"response": "old", "Frage": "q", "antwort": "a"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    found = load(path, columns={"Frage": "query", "antwort": "response"})
    assert found.train[0].content == (("user", "q"), ("assistant", "a"))


def test_a_column_that_no_row_has(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [PAIR])
    message = refusal(path, columns={"frage": "query"})
    assert "renames 'frage', which no row has; name one of completion, prompt" in message


def test_a_given_format_decides(tmp_path: Path) -> None:
    rows = [{"text": "t", "instruction": "q", "output": "a"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert load(path, format="text").train[0].text == "t"
    assert load(path).train[0].text is None
    message = refusal(path, format="messages")
    assert (
        "a.jsonl:1: has the format alpaca, but data.format makes this file messages; a" in message
    )


def test_system_text_where_there_is_none(tmp_path: Path) -> None:
    rows = [{"query": "q", "response": "a"}, {"query": "q", "response": "a", "system": "own"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    found = load(path, system="be brief").train
    assert [example.messages[0] for example in found] == [
        Message("system", "be brief"),
        Message("system", "own"),
    ]
    texts = write_jsonl(tmp_path / "b.jsonl", [{"text": "t"}])
    assert load(texts, system="be brief").train == (Example(text="t", source=f"{texts}:1"),)


# Bad rows.


def test_bad_rows_are_told_together_with_place_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [PAIR, {"a": 1, "b": 2}, [1], {"prompt": "q", "completion": ""}]
    write_jsonl(path, rows)
    with path.open("a") as file:
        file.write("{broken\n")
    assert refusal(path) == (
        "4 of 5 rows cannot be used; correct them, or leave them out with --skip-bad-rows "
        "(data.skip_bad_rows=true):\n"
        f"  {path}:2: the keys 'a', 'b' fit no prompt-completion row\n"
        f"  {path}:3: the row is a list, not an object with named columns\n"
        f"  {path}:4: 'completion' is empty\n"
        f"  {path}:5: not valid JSON: Expecting property name enclosed in double quotes "
        "at column 2\n"
        "Accepted rows (or name the columns with data.columns):\n"
        '  prompt-completion: {"prompt": ..., "completion": ...}'
    )


def test_bad_rows_of_all_files_are_told(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "a.jsonl", [PAIR, {"x": 1}])
    other = write_jsonl(tmp_path / "b.jsonl", [{"text": ""}, {"text": "t"}])
    message = refusal(one, eval=[other])
    assert f"{one}:2: " in message and f"{other}:1: 'text' is empty" in message


def test_only_twenty_are_shown(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": ""}] * 50 + [{"text": "t"}])
    message = refusal(path)
    assert message.startswith("50 of 51 rows") and message.endswith("and 30 more")
    assert message.count("'text' is empty") == 20


def test_mixed_formats_are_refused_with_both_names_and_places(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*chat_rows(2), PAIR])
    assert (
        f"{path}:3: has the format prompt-completion, but {path}:1 makes this file messages; "
        "a file holds one format"
    ) in refusal(path)
    found = load(path, skip_bad_rows=True)
    assert len(found.train) == 2 and found.counts.bad == 1


def test_an_unknown_format_shows_all_shapes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"foo": 1}])
    message = refusal(path)
    assert f"{path}:1: the keys 'foo' fit no known format" in message
    for name in ("messages", "sharegpt", "alpaca", "prompt-completion", "query-response", "text"):
        assert f"\n  {name}: {{" in message


def test_skipped_rows_are_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"foo": 1}, PAIR, {"prompt": "q"}])
    found = load(path, skip_bad_rows=True)
    assert [example.source for example in found.train] == [f"{path}:2"]
    assert (found.counts.rows, found.counts.bad) == (3, 2)
    assert found.counts.bad_reasons == (
        f"{path}:1: the keys 'foo' fit no known format",
        f"{path}:3: the keys 'prompt' fit no prompt-completion row",
    )
    assert "2 bad rows left out" in str(found.counts)


def test_nothing_left_after_skipping(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"foo": 1}])
    assert refusal(path, skip_bad_rows=True) == (
        f"No usable training row in {path}: all rows are bad."
    )


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", "\n \n"), ("a.json", "[]"), ("a.csv", "a\n")]
)
def test_file_without_rows(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert "has no rows; put at least one row into it" in refusal(tmp_path / name)


def test_a_missing_second_file_is_found_before_the_first_is_read(tmp_path: Path) -> None:
    bad = write_jsonl(tmp_path / "a.jsonl", [{"foo": 1}])
    assert "There is no data file" in refusal(bad, tmp_path / "none.jsonl")
    assert "There is no data file" in refusal(bad, eval=[tmp_path / "none.jsonl"])


# The held-out part.


def contents(examples: tuple[Example, ...]) -> list[Any]:
    return [example.content for example in examples]


def test_split_takes_its_share_and_keeps_the_order(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chat_rows(200))
    found = load(path, eval_fraction=0.1)
    assert (len(found.train), len(found.eval)) == (180, 20)
    for part in (found.train, found.eval):
        lines = [int(example.source.rsplit(":", 1)[1]) for example in part]
        assert lines == sorted(lines)
    assert not {*contents(found.train)} & {*contents(found.eval)}
    assert found.counts.also_in_train == 0


def test_split_depends_on_rows_and_seed_and_not_on_order(tmp_path: Path) -> None:
    rows = chat_rows(100)
    one = write_jsonl(tmp_path / "a.jsonl", rows)
    other = write_jsonl(tmp_path / "b.jsonl", rows[::-1])
    first, second = (load(path, eval_fraction=0.2) for path in (one, other))
    assert {*contents(first.eval)} == {*contents(second.eval)}
    assert {*contents(first.eval)} != {*contents(load(one, eval_fraction=0.2, seed=1).eval)}


def test_repeats_stay_on_one_side(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chat_rows(10) * 3)
    found = load(path, eval_fraction=0.3)
    assert len(found.eval) == 9 and len(found.train) == 21
    assert found.counts.also_in_train == 0
    assert found.counts.repeated == 14


@pytest.mark.parametrize(("count", "held"), [(1, 0), (2, 1), (10, 1)])
def test_small_sets_hold_out_one_and_never_all(tmp_path: Path, count: int, held: int) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chat_rows(count))
    found = load(path, eval_fraction=0.01)
    assert (len(found.train), len(found.eval)) == (count - held, held)


def test_eval_rows_that_are_training_rows_are_counted(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", chat_rows(6))
    held = write_jsonl(tmp_path / "b.jsonl", chat_rows(8)[4:])
    found = load(train, eval=[held], eval_fraction=0.5)
    assert (len(found.train), len(found.eval)) == (6, 4)
    assert found.counts.also_in_train == 2
    assert "2 eval rows are also in train" in str(found.counts)


def test_limits(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chat_rows(100))
    found = load(path, eval_fraction=0.3, limit=5, eval_limit=2)
    full = load(path, eval_fraction=0.3)
    assert found.train == full.train[:5] and found.eval == full.eval[:2]


def test_content_nested_beyond_reading_is_a_bad_row(tmp_path: Path) -> None:
    deep = '{"text": [' * 400 + '"x"' + "]}" * 400
    answer = '{"role": "assistant", "content": "b"}'
    row = f'{{"messages": [{{"role": "user", "content": [{deep}]}}, {answer}]}}'
    (tmp_path / "a.jsonl").write_text(row + "\n")
    assert "a.jsonl:1: " in refusal(tmp_path / "a.jsonl")
