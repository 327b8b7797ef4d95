"""Interactions in files of users: formats are detected or given, ids stay as written, ambiguous files are refused."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import Histories, read_interactions, sources

ROWS = [(7, 100, 1), (7, 300, 2), (3, 300, 5), (7, 200, 3), (3, 100, 6)]


def _text(folder: Path, text: str, name: str = "rows.txt") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def _lines(rows: list[tuple[Any, ...]], delimiter: str) -> str:
    return "".join(delimiter.join(map(str, row)) + "\n" for row in rows)


def _grouped_by_user(histories: Histories) -> dict[Any, list[tuple[Any, Any]]]:
    """Return items and times of every user, by the source's ids."""
    items = histories.item_ids[histories.items].tolist()
    places = list(zip(items, histories.times.tolist()))
    return {u: places[a:b] for u, a, b in zip(histories.user_ids.tolist(), histories.offsets, histories.offsets[1:])}


EXPECTED = {3: [(300, 5), (100, 6)], 7: [(100, 1), (300, 2), (200, 3)]}


@pytest.mark.parametrize("delimiter", ["\t", " ", ",", "::", "|", "||"])
@pytest.mark.parametrize(("suffix", "header"), [(".txt", True), (".txt", False), (".dat.gz", False), (".csv", True)])
def test_delimiters_and_headers(delimiter: str, suffix: str, header: bool, tmp_path: Path) -> None:
    names = [("user", "item", "time")] if header else []
    path = _text(tmp_path, _lines([*names, *ROWS], delimiter), f"rows{suffix}")
    said = {"delimiter": delimiter} if "|" in delimiter else {}
    assert _grouped_by_user(read_interactions(path, user=0, item=1, time=2, **said)) == EXPECTED
    assert _grouped_by_user(read_interactions(path, user=0, item=1, time=2, delimiter=delimiter, header=header)) == EXPECTED
    if header:
        assert _grouped_by_user(read_interactions(path, **said)) == EXPECTED
        assert _grouped_by_user(read_interactions(path, item=1, **said)) == EXPECTED
        return
    with pytest.raises(ValueError, match=r"'7', '100', '1'.* 'user'"):
        read_interactions(path, **said)


@pytest.mark.parametrize("order", ["given", "sort"])
@pytest.mark.parametrize("scale", [1, 10**13, 0.5], ids=["packed", "too large to pack", "floats"])
def test_any_order_of_rows(order: str, scale: float) -> None:
    """Group rows as a stable sort by user, and optionally by time, does."""
    random = np.random.default_rng(0)
    users, items, times = random.integers(-50, 50, 3000), random.integers(0, 300, 3000), np.arange(3000) // 2 - 700
    if order == "sort":
        random.shuffle(times)
    expected = np.lexsort((times, users))
    table = pa.table({"user": users, "item": items, "time": times * scale})
    half = pa.concat_tables([table.slice(0, 1000), table.slice(1000)])  # in chunks
    for source in (table, half):
        histories = read_interactions(source, order=order, ties="keep")
        assert histories.user_ids.tolist() == np.unique(users).tolist()
        np.testing.assert_array_equal(histories.item_ids[histories.items], items[expected])
        np.testing.assert_array_equal(histories.times, (times * scale)[expected])
        np.testing.assert_array_equal(np.repeat(histories.user_ids, histories.lengths), users[expected])


def test_other_columns_blank_lines_windows_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = 'title,time,"user id",item\n"a, ""b""",1,7,100\n,2,7,300\n'
    assert _grouped_by_user(read_interactions(_text(tmp_path, text), user="user id")) == {7: [(100, 1), (300, 2)]}
    text = "\ufeff\r\nuser,item,time\r\n\r\n" + _lines(ROWS, ",").replace("\n", "\r\n\r\n")
    assert _grouped_by_user(read_interactions(_text(tmp_path, text))) == EXPECTED
    histories = "\ufeff\r\n3 300 100\r\n\r\n7 100 300 200 \r\n"
    assert _grouped_by_user(read_interactions(_text(tmp_path, histories), time=None)) == _places(EXPECTED)


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        (["10", "9", "-1"], [-1, 9, 10]),
        (["0007", "7"], ["0007", "7"]),  # as Amazon's, which are not all digits
        (["0001714473", "B00A"], ["0001714473", "B00A"]),
        (["18446744073709551615", "1"], ["1", "18446744073709551615"]),
        (["1e5", "2"], ["1e5", "2"]),
        (["é", "z"], ["z", "é"]),
    ],
)
def test_ids_as_written(written: list[str], ids: list[Any], tmp_path: Path) -> None:
    path = _text(tmp_path, "".join(f"1,{value},{row}\n" for row, value in enumerate(written)))
    histories = read_interactions(path, user=0, item=1, time=2)
    assert histories.item_ids.tolist() == ids
    assert histories.item_ids[histories.items].tolist() == [int(v) if isinstance(ids[0], int) else v for v in written]
    repeated = "".join(f"u{value} {' '.join(written)}\n" for value in written)
    assert read_interactions(_text(tmp_path, repeated), line="user", header=False, time=None).item_ids.tolist() == ids


def test_long_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a file longer than the sample for detection, with one id with a letter after thousands of integers."""
    rows = [(f"A{number % 100}", 1_000_000 + number, number) for number in range(5000)]
    for name, block in (("rows.txt", 1 << 24), ("rows.txt", 4096), ("rows.txt.gz", 4096)):
        monkeypatch.setattr(sources, "_BLOCK", block)
        path = _text(tmp_path, _lines([*rows, ("A0", "B1", 9000)], ","), name)
        histories = read_interactions(path, user=0, item=1, time=2)
        assert len(histories.items) == 5001 and histories.num_items == 5001
        assert histories.item_ids[histories.items[histories.offsets[1] - 1]] == "B1"
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"row 20000 has 2 values.* 3 \(delimiter=','\)"):
        read_interactions(_text(tmp_path, "\nuser,item,time\n" + "\n1,2,3\n" * 20_000 + "1,2\n1\n"))


DAY = 86_400


@pytest.mark.parametrize(
    ("written", "times"),
    [
        (["0.25", "1.5", "1e3"], [0.25, 1.5, 1000.0]),
        (["1", "1.5", "2"], [1.0, 1.5, 2.0]),
        (["1970-01-02", "1970-01-03", "1970-01-04"], [DAY, 2 * DAY, 3 * DAY]),
        (["1970-01-01 00:00:01", "1970-01-01 00:01:00", "1970-01-02 00:00:00"], [1, 60, DAY]),
        (["1970-01-01T00:00:01Z", "1970-01-01T00:01:00Z", "1970-01-02T01:00:00+01:00"], [1, 60, DAY]),
        (["1970-01-01T00:00:01.5", "1970-01-01T00:00:02", "1970-01-01T00:00:03"], [1.5e9, 2e9, 3e9]),
        (["1970-01-01", "1970-01-01T00:01:00", "1970-01-02"], [0, 60, DAY]),
    ],
)
@pytest.mark.parametrize("block", [1 << 24, 128], ids=["one block", "a block a line"])
def test_times(written: list[str], times: list[float], block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read times from text, from strings of a table and from categories, in one block or several."""
    monkeypatch.setattr(sources, "_BLOCK", block)
    path = _text(tmp_path, "".join(f"{'u' * 50},i,{value}\n" for value in written))
    table = pa.table({"user": [1] * 3, "item": [1] * 3, "time": written})
    categories = table.set_column(2, "time", table["time"].dictionary_encode())
    for histories in (read_interactions(path, user=0, item=1, time=2), read_interactions(table), read_interactions(categories)):
        assert histories.times.tolist() == times
        assert histories.times.dtype == (np.float64 if isinstance(times[0], float) and times[0] < 1e9 else np.int64)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (["1", "2", "yesterday"], "'yesterday' in row 2, and '1' in row 0"),
        (["Tue Apr 03", "Wed Apr 04"], "'Tue Apr 03' in row 0"),
        (["1970-01-01", "1970-13-01"], "'1970-13-01' in row 1"),
        (["1970-01-01T00:00:00", "1970-01-01T00:00:00Z", "5"], "'1970-01-01T00:00:00Z' in row 1"),
        (["1", "", "NA"], "2 missing values.* row 1"),
        (["1.5", "inf", "inf"], "inf in row 1 and 1 more"),
        (["true", "false"], "'true' in row 0"),
    ],
)
@pytest.mark.parametrize("block", [1 << 24, 128], ids=["one block", "a block a line"])
def test_bad_times(written: list[str], message: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BLOCK", block)
    path = _text(tmp_path, "user,item,time\n" + "".join(f"{'u' * 50},i,{value}\n" for value in written))
    with pytest.raises(ValueError, match=rf"column 'time' of {path} .*{message}"):
        read_interactions(path)


def _places(histories: dict[Any, list[tuple[Any, Any]]]) -> dict[Any, list[tuple[Any, int]]]:
    return {user: [(item, place) for place, (item, _) in enumerate(items)] for user, items in histories.items()}


@pytest.mark.parametrize("delimiter", [" ", "\t", ",", "::"])
@pytest.mark.parametrize("block", [1 << 24, 4], ids=["one block", "four bytes a block"])
def test_one_line_a_user(delimiter: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files such as LightGCN's Gowalla and Yelp."""
    monkeypatch.setattr(sources, "_BLOCK", block)
    text = _lines([(7, 100, 300, 200), (3, 300, 100)], delimiter)
    for name in ("train.txt", "train.txt.gz"):
        assert _grouped_by_user(read_interactions(_text(tmp_path, text, name), time=None)) == _places(EXPECTED)
    even = _text(tmp_path, _lines([("u", "i", "j"), ("v", "j", "i")], delimiter))
    histories = read_interactions(even, line="user", time=None, header=False)
    assert _grouped_by_user(histories) == {"u": [("i", 0), ("j", 1)], "v": [("j", 0), ("i", 1)]}
    named = read_interactions(even, line="user", time=None, header=True)
    assert _grouped_by_user(named) == {"v": [("j", 0), ("i", 1)]}


def test_two_lines_of_a_user_follow_each_other(tmp_path: Path) -> None:
    path = _text(tmp_path, "7 1 2\n3 1\n7 9\n")
    assert _grouped_by_user(read_interactions(path, line="user", time=None)) == {3: [(1, 0)], 7: [(1, 0), (2, 1), (9, 2)]}
    table = pa.table({"user": [7, 3, 7, 7], "item": [5, 5, 4, 5]})  # without times, rows are in order
    assert _grouped_by_user(read_interactions(table, time=None)) == {3: [(5, 0)], 7: [(5, 0), (4, 1), (5, 2)]}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("7 1 2\n\n3\n4\n", {"line": "user", "time": None}, "line 3 and 1 more"),
        ("7,1,2\n\n3,,5,6\n", {"line": "user", "time": None}, "line 3"),
        ("7 1 2\n3 1\n", {"line": "user"}, "line=\"user\" .*time='time'"),
        ("7 1 2\n3 1\n", {"line": "user", "time": None, "user": 1}, "line=\"user\" .* user=1, item='item'"),
        ("7 1 2\n3 1\n", {"line": "list", "time": None}, "line='list'"),
        ("7 1 2\n3 1\n", {}, r"line 2 has 2 values.* 3 \(delimiter=' '\).*line=\"user\", time=None"),
        ("user,item,time\n\n1,2,3\n1,2\n", {}, r"line 4 has 2 values.* 3 \(delimiter=','\)"),
        ("7 1 2\n3 1\n7 9\n", {"time": None}, r"line 2 has 2 values.* 3 .*line=\"user\", time=None"),
        ("a b,c\nd e,f\n", {"user": 0, "item": 1, "time": None}, r"delimiter= .*',' \(2 values .*' ' \(2 values"),
        ("a,b\nc,d\n", {"user": 0, "item": 1, "time": None}, r"\['a', 'b'\].* header=True or header=False"),
        ("a,B1,1\nb,2,2\nc,3,3\n", {"user": 0, "item": 1, "time": 2}, r"\['a', 'B1', '1'\].* header=True or header=False"),
        ("a;b\nc;d\n", {"user": 0, "item": 1, "time": None}, r"'a;b'.*delimiter="),
        ("a,b\nc,d\n", {"delimiter": "|"}, r"no '\|'"),
        ("a,b\nc,d\n", {"delimiter": ""}, r"delimiter=''"),
        ("a,b\nc,d\n", {"delimiter": ":::"}, r"delimiter=':::'"),
        ("user,item,time\n1,2,3\n", {"header": False}, r"header=False.* column 'user'"),
        ("1,2,3\n1,2,3\n", {"user": 0, "item": 1, "time": 3}, r"column 3, only \[0, 1, 2\]"),
        ("1,2,3\n1,2,3\n", {"user": 0, "item": 1, "time": -1}, r"column -1, only \[0, 1, 2\]"),
        ("1,2,3\n1,2,3\n", {"user": 0, "item": 1, "time": 1}, r"columns \[0, 1, 1\]"),
        ("user,item,user\n1,2,3\n", {"time": None}, "several columns 'user'"),
        ("user,name\n1,2\n", {}, r"column 'item', only \['user', 'name'\]"),
        ("\n \n", {}, "rows.txt"),
        ("", {}, "rows.txt"),
        ("user,item,time\n", {}, "rows.txt"),
        ("user,item,time\n1,7,3\n1,2.5,4\n", {}, "'item' .* 2.5 in row 1"),
        ("user,item,time\n1,2,4\n1,,3\n", {}, "'item' .* 1 missing values.* row 1"),
        ("user,item,time\n1,10,5\n2,10,9\n2,11,8\n1,12,5\n", {}, r"'time'.* user 2 .*rows \[1, 2\] and 0 more.*order="),
        ("u,i,t\n1,10,5\n1,11,3\n", {"user": "u", "item": "i", "time": "t"}, r"'t'.* user 1 .*rows \[0, 1\]"),
        ("user,item,time\n1,10,5\n2,10,9\n2,11,8\n1,12,5\n", {"order": "sort"}, r"user 1 .* time=5 in rows \[0, 3\].*ties="),
        ("user,item,time\n1,2,3\n", {"order": "sorted"}, "order='sorted'"),
        ("user,item,time\n1,2,3\n", {"ties": "drop"}, "ties='drop'"),
        ("user,item,time\n1,2,3\n", {"time": None, "order": "sort"}, "time=None, order='sort'"),
        ("user,item,time\n1,2,3\n", {"time": None, "ties": "keep"}, "time=None.* ties='keep'"),
        ('user,item,time\n1,"2,3\n1,5,4\n1,"6,7\n1,8,9\n', {}, "rows.txt"),
        ('{"user": 1, "item": 2}\n{"user": 1, "item": 3}\n', {}, "JSON lines"),
        ("u:token\ti:token_seq\n1\t2 3\n", {"user": "u:token", "item": "i:token_seq", "time": None}, "'i:token_seq'.* list"),
        ("u:token\ti:token_seq\n1\t2 3\n", {"user": 0, "item": 1, "time": None, "header": True}, "'i:token_seq'.* list"),
        ("user,item,time\n1,2,5/15/2014 3:58\n", {}, "'5/15/2014 3:58' in row 0. Times"),
    ],
)
def test_what_is_not_clear(text: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_interactions(_text(tmp_path, text), **options)


def test_what_is_not_clear_can_be_said_by_an_option_or_the_suffix(tmp_path: Path) -> None:
    path, columns = _text(tmp_path, "a b,c\nd e,f\n"), {"user": 0, "item": 1, "time": None}
    assert _grouped_by_user(read_interactions(path, **columns, delimiter=",", header=True)) == {"d e": [("f", 0)]}
    assert read_interactions(path, **columns, delimiter=" ", header=False).user_ids.tolist() == ["a", "d"]
    for name, text, users in (("a.csv.gz", "a b,c\nd e,f\n", ["a b", "d e"]), ("a.tsv", "a,b\tc\nd,e\tf\n", ["a,b", "d,e"])):
        assert read_interactions(_text(tmp_path, text, name), **columns, header=False).user_ids.tolist() == users
    path = _text(tmp_path, "1,2,,5\n1,3,9,6\n")  # no header above a missing value
    assert _grouped_by_user(read_interactions(path, user=0, item=1, time=3)) == {1: [(2, 5), (3, 6)]}


@pytest.mark.parametrize(("delimiter", "block"), [("\t", 1 << 24), ("\t", 40), ("::", 1 << 24)])
def test_quotation_marks_have_no_meaning_without_commas(
    delimiter: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_BLOCK", block)
    artists = ['"Heroes', "a", '"Weird Al" Yankovic', "b", 'Sign "O"', '"c', '"']
    rows = [(user, artist, time) for user in (1, 2) for time, artist in enumerate(artists)]
    histories = read_interactions(_text(tmp_path, "\n" + _lines(rows, delimiter)), user=0, item=1, time=2, header=False)
    assert _grouped_by_user(histories) == {user: [(artist, time) for time, artist in enumerate(artists)] for user in (1, 2)}


def test_a_delimiter_of_two_bytes_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _lines([(number, f"a:{number}", number) for number in range(200)], "::")
    for block in (64, 65, 66, 67):
        monkeypatch.setattr(sources, "_BLOCK", block)
        histories = read_interactions(_text(tmp_path, text), user=0, item=1, time=2)
        assert _grouped_by_user(histories) == {number: [(f"a:{number}", number)] for number in range(200)}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"user,item,time\n" + b"1,2,3\n" * 5000, mtime=0)[:60])
    pa.parquet.write_table(pa.table({"user": [1] * 1000, "item": [2] * 1000, "time": range(1000)}), tmp_path / "cut.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "cut.parquet").read_bytes()[:-100])
    (tmp_path / "utf16.csv").write_bytes("user,item,time\n1,2,3\n".encode("utf-16"))
    (tmp_path / "latin.csv").write_bytes(b"user,item,time\n1,\xff,3\n")
    (tmp_path / "bytes.csv").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "line.csv").write_bytes(b"1 2\n2 \xff 3\n")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(ValueError, match=re.escape(path.name)):
            read_interactions(path, time=None if path.name == "line.csv" else "time")
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        read_interactions(tmp_path / "none.csv")


class _Stream:
    """An object whose only known interface is the Arrow stream."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


class _Frame(_Stream):
    """A data frame such as that of pandas or polars, whose columns are selected before they are converted."""

    def __init__(self, columns: dict[Any, list[Any]]) -> None:
        self.columns, self._values = list(columns), columns

    def to_numpy(self) -> None:
        raise AssertionError("the whole frame is not wanted")

    def __getitem__(self, names: list[Any]) -> _Stream:
        return _Stream(pa.table({str(name): self._values[name] for name in names}))


def test_frames_and_streams() -> None:
    users, items, times = map(list, zip(*ROWS))
    frame = _Frame({"title": [1, "mixed", None, 2, 3], "item": items, "user": users, "time": times})
    assert _grouped_by_user(read_interactions(frame)) == EXPECTED
    assert _grouped_by_user(read_interactions(frame, user=2, item="item", time=3)) == EXPECTED
    stream = _Stream(pa.table({"user": users, "item": items, "time": times}))
    assert _grouped_by_user(read_interactions(stream)) == EXPECTED
    assert _grouped_by_user(read_interactions(stream, user=0, item=1, time=2)) == EXPECTED
    with pytest.raises(ValueError, match=r"table has no column 'movie', only \['title', 'item', 'user', 'time'\]"):
        read_interactions(frame, item="movie")
    with pytest.raises(ValueError, match=r"\['user', 'title', 'time'\] of the table"):
        read_interactions(frame, item="title")
    with pytest.raises(TypeError, match="list"):
        read_interactions([1, 2])


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_kinds_of_strings_and_parquet(kind: pa.DataType, tmp_path: Path) -> None:
    users, items, times = map(list, zip(*ROWS))
    if pa.types.is_dictionary(kind):  # a category without a row is no user
        column = pa.DictionaryArray.from_arrays(pa.array([2, 2, 1, 2, 1], pa.int8()), pa.array(["0", "3", "7"]))
    else:
        column = pa.array(map(str, users), kind)
    table = pa.table({"user": column, "item": items, "time": times, "else": [None] * 5})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    folder = tmp_path / "parts.parquet"
    folder.mkdir()
    for part in range(5):
        pa.parquet.write_table(table.slice(part, 1), folder / f"{part}.parquet")
    for source in (table, tmp_path / "rows.parquet", folder):
        assert _grouped_by_user(read_interactions(source)) == {str(user): history for user, history in EXPECTED.items()}
        assert _grouped_by_user(read_interactions(source, user=0, item=1, time=2)) == {
            str(user): history for user, history in EXPECTED.items()
        }


@pytest.mark.parametrize("option", [{"delimiter": ","}, {"header": False}, {"line": "interaction"}])
def test_options_of_text_for_what_is_none(option: dict[str, Any], tmp_path: Path) -> None:
    table = pa.table({"user": [1], "item": [2], "time": [3]})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    for source, name in ((table, "table"), (tmp_path / "rows.parquet", "rows.parquet")):
        with pytest.raises(ValueError, match=f"{next(iter(option))}=.*{name}"):
            read_interactions(source, **option)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"user": "time", "time": None}, "'item' of table has type bool,.* True in row 0"),
        ({"user": "time", "item": "list", "time": None}, "'list' of table has type list<.*>"),
        ({"item": "time", "time": "item", "user": "user"}, "'item' of table has type bool,.* True in row 0"),
        ({"item": "time", "time": None}, "'user' of table has type double,.* 1.5 in row 0"),
        ({"user": "time", "item": "huge", "time": None}, "'huge' of table .*64-bit"),
    ],
)
def test_other_ids_are_refused(options: dict[str, Any], message: str) -> None:
    huge = pa.array([2**63 + 5], pa.uint64())
    with pytest.raises(ValueError, match=message):
        read_interactions(pa.table({"user": [1.5], "item": [True], "time": [3], "list": [[1]], "huge": huge}), **options)


def test_the_data_module_passes_everything_on(tmp_path: Path) -> None:
    path = _text(tmp_path, "user|item|when\nu|i1|1\nu|i2|2\nu|i3|3\nu|i4|4\n")
    options = {"user": 0, "item": 1, "time": 2, "delimiter": "|", "header": True, "line": "interaction"}
    module = FreeScaleDataModule.from_interactions(path, **options)
    assert module.histories.item_ids.tolist() == ["i1", "i2", "i3", "i4"]
    histories = _text(tmp_path, "u i1 i2 i3 i4\nv i1 i2 i3 i4 i5\n")
    module = FreeScaleDataModule.from_interactions(histories, time=None, line="user", header=False)
    assert module.histories.lengths.tolist() == [4, 5]
