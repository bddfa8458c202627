"""Each kind of file: its rows, their true places, and what is told when it cannot be read."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hirank.errors import HirankError
from hirank.train.rows import Raw, read_rows


def rows(path: Path, content: str | bytes) -> list[Raw]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_rows(path))


def refusal(path: Path, content: str | bytes) -> str:
    with pytest.raises(HirankError) as caught:
        rows(path, content)
    return str(caught.value)


# jsonl


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "A.JSONL"])
def test_jsonl_skips_blank_lines_and_keeps_line_numbers(tmp_path: Path, name: str) -> None:
    assert rows(tmp_path / name, '\n{"a": 1}\r\n  \n{"a": 2}') == [
        Raw("2", {"a": 1}),
        Raw("4", {"a": 2}),
    ]


def test_jsonl_with_byte_order_mark_and_line_separators_in_text(tmp_path: Path) -> None:
    found = rows(tmp_path / "a.jsonl", '\ufeff{"a": "x\u2028y\x85z"}\n{"a": 2}\n')
    assert found == [Raw("1", {"a": "x\u2028y\x85z"}), Raw("2", {"a": 2})]


def test_jsonl_reports_broken_lines_and_reads_on(tmp_path: Path) -> None:
    content = b'{"a": 1\n{"a": "\xff"}\n' + b"[" * 100_000 + b'\n{"a": ' + b"9" * 5000 + b"}\n4\n"
    found = rows(tmp_path / "a.jsonl", content)
    assert [raw.place for raw in found] == ["1", "2", "3", "4", "5"]
    assert found[0].problem == "not valid JSON: Expecting ',' delimiter at column 8"
    assert found[1].problem == "not valid UTF-8 at byte 8 of the line"
    assert "recursion" in found[2].problem
    assert "not usable JSON" in found[3].problem
    assert found[4] == Raw("5", 4)


# json


@pytest.mark.parametrize("pretty", [None, 2])
def test_json_list_has_true_line_numbers(tmp_path: Path, pretty: int | None) -> None:
    data = [{"a": "x\ny"}, {"b": [1, {"c": 2}]}, 3]
    text = json.dumps(data, indent=pretty)
    found = rows(tmp_path / "a.json", "\n" + text + "\n")
    assert [raw.value for raw in found] == data
    assert [raw.place for raw in found] == (["3", "6", "14"] if pretty else ["2", "2", "2"])


def test_json_object_with_data(tmp_path: Path) -> None:
    text = '{"version": {"data": 1},\n "data": [\n{"a": 1},\n{"a": 2}],\n "more": [], "n": 1}\n'
    assert rows(tmp_path / "a.json", text) == [Raw("3", {"a": 1}), Raw("4", {"a": 2})]


def test_json_that_is_jsonl_in_truth(tmp_path: Path) -> None:
    text = '{"a": 1}\n{"data": "no list", "a": 2}\n\n{\n"a": 3}'
    found = rows(tmp_path / "a.json", text)
    assert [(raw.place, raw.value["a"]) for raw in found] == [("1", 1), ("2", 2), ("4", 3)]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('[{"a": 1},\n{"a": }]', 2, "Expecting value"),
        ('[{"a": 1}\n{"a": 2}]', 2, "expected ']'"),
        ('[{"a": 1},\n]', 2, "Expecting value"),
        ('[{"a": 1}', 1, "expected ']'"),
        ('[{"a": 1}]\n\n[]', 3, "something follows"),
        ('{"data": [{"a": 1}]', 1, "expected '}'"),
        ('{"data" [1]}', 1, "expected ':'"),
        ("hello", 1, "Expecting value"),
        ("[" * 100_000, 1, "recursion"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_broken_json_names_the_line(tmp_path: Path, text: str, line: int, reason: str) -> None:
    message = refusal(tmp_path / "a.json", text)
    assert message.startswith(f"{tmp_path / 'a.json'}:{line}: not valid JSON: ")
    assert reason in message


@pytest.mark.parametrize("text", ["[]", " \n", '{"data": []}'])
def test_json_without_rows(tmp_path: Path, text: str) -> None:
    assert rows(tmp_path / "a.json", text) == []


# csv


def test_csv_lines_are_true_with_cells_over_several_lines(tmp_path: Path) -> None:
    text = 'prompt,completion\n"a\nb",c\n\nd,"e, ""f"""\n"g\n\n",h\ni,j\n'
    found = rows(tmp_path / "a.csv", text)
    assert [(raw.place, raw.value["prompt"]) for raw in found] == [
        ("2", "a\nb"),
        ("5", "d"),
        ("6", "g\n\n"),
        ("9", "i"),
    ]
    assert found[1].value["completion"] == 'e, "f"'


def test_csv_keeps_line_ends_inside_cells_and_drops_the_byte_order_mark(tmp_path: Path) -> None:
    found = rows(tmp_path / "a.csv", '\ufeffa,b\r\n1,"x\r\ny"\r\n')
    assert found == [Raw("2", {"a": "1", "b": "x\r\ny"})]


def test_csv_with_a_wrong_number_of_cells(tmp_path: Path) -> None:
    found = rows(tmp_path / "a.csv", "a,b\n1\n1,2,3\n4,5\n")
    assert found[0].problem == "has 1 cells, but the header has 2"
    assert found[1].problem == "has 3 cells, but the header has 2"
    assert found[2] == Raw("4", {"a": "4", "b": "5"})


def test_csv_takes_long_cells_and_leaves_the_limit_alone(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    found = rows(tmp_path / "a.csv", f"a\n{'x' * 200_000}\n")
    assert len(found[0].value["a"]) == 200_000
    assert csv.field_size_limit() == limit


def test_csv_faults(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    assert f"{path}:3: not valid csv: unexpected end of data" in refusal(path, 'a\n1\n"2\n')
    assert f"{path}:1: the header names the column 'a' twice" in refusal(path, "a,b,a\n1,2,3\n")
    assert rows(path, "a,b\n") == []


@pytest.mark.parametrize("name", ["a.csv", "a.json"])
def test_invalid_utf8_names_the_line(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path / name, b'a\n"b"\n"\xe4"\n')
    assert message == f"{tmp_path / name}:3: not valid UTF-8; save the file as UTF-8."


# parquet


def test_parquet_rows_count_from_zero(tmp_path: Path) -> None:
    data = [{"messages": [{"role": "user", "content": "q"}], "n": 1}, {"messages": None, "n": 2}]
    pq.write_table(pa.Table.from_pylist(data), tmp_path / "a.parquet")
    found = list(read_rows(tmp_path / "a.parquet"))
    assert found == [Raw("row 0", data[0]), Raw("row 1", data[1])]


def test_parquet_that_is_none(tmp_path: Path) -> None:
    message = refusal(tmp_path / "a.parquet", b"no parquet at all")
    assert message.startswith(f"{tmp_path / 'a.parquet'}: not a readable parquet file: ")
    assert "\n" not in message


# Files.


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(HirankError, match="did you mean .*train.jsonl?"):
        list(read_rows(tmp_path / "trian.jsonl"))
    with pytest.raises(HirankError, match="no data file .*; check the path"):
        list(read_rows(tmp_path / "zzzzz"))
    with pytest.raises(HirankError, match=f"nor the folder {tmp_path / 'no'}"):
        list(read_rows(tmp_path / "no" / "train.jsonl"))


def test_folder_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(HirankError, match=r"is a folder; .* \(it holds none\)"):
        list(read_rows(tmp_path))
    (tmp_path / "b.csv").write_text("a\n1\n")
    with pytest.raises(HirankError, match="for instance .*b.csv"):
        list(read_rows(tmp_path))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a"])
def test_unknown_extension(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path / name, "x")
    assert "unknown extension" in message and ".jsonl, .ndjson, .json, .csv, .parquet" in message


def test_empty_file(tmp_path: Path) -> None:
    assert "is empty" in refusal(tmp_path / "a.jsonl", "")


# Places that cannot be looked at.


def test_a_link_to_nowhere_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(HirankError, match="link to nowhere"):
        list(read_rows(tmp_path / "a.jsonl"))


def test_a_name_too_long_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(HirankError, match="too long"):
        list(read_rows(tmp_path / ("x" * 300 + ".jsonl")))


def test_a_parquet_column_given_twice(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(HirankError, match="'prompt' twice"):
        list(read_rows(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    "column",
    [pa.array([b"\xff"]).view(pa.string()), pa.array([10**14], pa.timestamp("s"))],
    ids=["text that is not UTF-8", "a date beyond the calendar"],
)
def test_parquet_values_that_python_cannot_hold(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet")
    with pytest.raises(HirankError, match="not a readable parquet file"):
        list(read_rows(tmp_path / "a.parquet"))
