"""Files as users have them: formats are found or named, ids stay as written, and what is not clear is an error."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import Histories, read_interactions
from lightning_freescale.data import raw_files as raw_files_module

ROOT = Path(__file__).parents[2]
ROWS = [(7, 100, 1), (7, 300, 2), (3, 300, 5), (7, 200, 3), (3, 100, 6)]


def _text(folder: Path, text: str, name: str = "rows.txt") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def _lines(rows: list[tuple[Any, ...]], delimiter: str) -> str:
    return "".join(delimiter.join(map(str, row)) + "\n" for row in rows)


def _told(histories: Histories) -> dict[Any, list[tuple[Any, Any]]]:
    """Items and times of every user, by the source's ids."""
    items = histories.item_ids[histories.items].tolist()
    places = list(zip(items, histories.times.tolist()))
    return {u: places[a:b] for u, a, b in zip(histories.user_ids.tolist(), histories.offsets, histories.offsets[1:])}


EXPECTED = {3: [(300, 5), (100, 6)], 7: [(100, 1), (300, 2), (200, 3)]}


@pytest.mark.parametrize("delimiter", ["\t", " ", ",", "::", "|", "||"])
@pytest.mark.parametrize("suffix", [".txt", ".dat.gz", ".csv"])
@pytest.mark.parametrize("header", [True, False])
def test_delimiters_and_headers(delimiter: str, suffix: str, header: bool, tmp_path: Path) -> None:
    names = [("user", "item", "time")] if header else []
    path = _text(tmp_path, _lines([*names, *ROWS], delimiter), f"rows{suffix}")
    said = {"delimiter": delimiter} if "|" in delimiter else {}
    assert _told(read_interactions(path, user=0, item=1, time=2, **said)) == EXPECTED
    assert _told(read_interactions(path, user=0, item=1, time=2, delimiter=delimiter, header=header)) == EXPECTED
    if header:
        assert _told(read_interactions(path, **said)) == EXPECTED
        assert _told(read_interactions(path, item=1, **said)) == EXPECTED
        return
    with pytest.raises(
        ValueError, match=r"has no header \(its first line .*'7', '100', '1'.* no column 'user': .*user=0, item=1"
    ):
        read_interactions(path, **said)


def test_movielens_1m(tmp_path: Path) -> None:
    """user::movie::rating::timestamp, no header."""
    text = "1::1193::5::978300760\n1::661::3::978302109\n2::1193::4::978298413\n"
    histories = read_interactions(_text(tmp_path, text, "ratings.dat"), user=0, item=1, time=3)
    assert _told(histories) == {1: [(1193, 978300760), (661, 978302109)], 2: [(1193, 978298413)]}


def test_windows_lines_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufeff\r\nuser,item,time\r\n\r\n" + _lines(ROWS, ",").replace("\n", "\r\n\r\n")
    assert _told(read_interactions(_text(tmp_path, text))) == EXPECTED
    histories = "\ufeff\r\n3 300 100\r\n\r\n7 100 300 200 \r\n"
    assert _told(read_interactions(_text(tmp_path, histories), time=None)) == _places(EXPECTED)


def test_other_columns_are_not_read(tmp_path: Path) -> None:
    text = 'title,time,"user id",item\n"a, ""b""",1,7,100\n,2,7,300\n'
    assert _told(read_interactions(_text(tmp_path, text), user="user id")) == {7: [(100, 1), (300, 2)]}


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


def test_ids_of_another_kind_far_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Amazon's: thousands of items of digits alone before the first with letters."""
    monkeypatch.setattr(raw_files_module, "_BLOCK", 4096)
    rows = [(f"A{number % 100}", 1_000_000 + number, number) for number in range(5000)]
    histories = read_interactions(_text(tmp_path, _lines([*rows, ("A0", "B1", 9000)], ",")), user=0, item=1, time=2)
    assert len(histories.items) == 5001 and histories.num_items == 5001
    assert histories.item_ids[histories.items[histories.offsets[1] - 1]] == "B1"


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
    """In one block or one each, what decides the type; as text, as strings of a table, and as categories."""
    monkeypatch.setattr(raw_files_module, "_BLOCK", block)
    path = _text(tmp_path, "".join(f"{'u' * 50},i,{value}\n" for value in written))
    table = pa.table({"user": [1] * 3, "item": [1] * 3, "time": written})
    categories = table.set_column(2, "time", table["time"].dictionary_encode())
    for histories in (read_interactions(path, user=0, item=1, time=2), read_interactions(table), read_interactions(categories)):
        assert histories.times.tolist() == times
        assert histories.times.dtype == (np.float64 if isinstance(times[0], float) and times[0] < 1e9 else np.int64)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (["1", "2", "yesterday"], r"column 'time' .* has 'yesterday' in row 2, and '1' in row 0: times are all numbers, or"),
        (["Tue Apr 03", "Wed Apr 04"], r"column 'time' .* has 'Tue Apr 03' in row 0"),
        (["1970-01-01", "1970-13-01"], r"column 'time' .* has '1970-13-01' in row 1"),
        (["1970-01-01T00:00:00", "1970-01-01T00:00:00Z", "5"], r"has '1970-01-01T00:00:00Z' in row 1"),
        (["1", "", "NA"], r"column 'time' .* has 2 missing values, the first in row 1"),
        (["1.5", "inf", "inf"], r"column 'time' .* has inf in row 1 and 1 more that are no times"),
        (["true", "false"], r"column 'time' .* has 'true' in row 0, and 'true' in row 0: times are all numbers"),
    ],
)
@pytest.mark.parametrize("block", [1 << 24, 128], ids=["one block", "a block a line"])
def test_bad_times(written: list[str], message: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_files_module, "_BLOCK", block)
    path = _text(tmp_path, "user,item,time\n" + "".join(f"{'u' * 50},i,{value}\n" for value in written))
    with pytest.raises(ValueError, match=message) as raised:
        read_interactions(path)
    assert str(path) in str(raised.value)


def _places(histories: dict[Any, list[tuple[Any, Any]]]) -> dict[Any, list[tuple[Any, int]]]:
    return {user: [(item, place) for place, (item, _) in enumerate(items)] for user, items in histories.items()}


@pytest.mark.parametrize("delimiter", [" ", "\t", ",", "::"])
@pytest.mark.parametrize("block", [1 << 24, 4], ids=["one block", "four bytes a block"])
def test_one_line_a_user(delimiter: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As LightGCN's Gowalla and Yelp."""
    monkeypatch.setattr(raw_files_module, "_BLOCK", block)
    text = _lines([(7, 100, 300, 200), (3, 300, 100)], delimiter)
    for name in ("train.txt", "train.txt.gz"):
        assert _told(read_interactions(_text(tmp_path, text, name), time=None)) == _places(EXPECTED)
    even = _text(tmp_path, _lines([("u", "i", "j"), ("v", "j", "i")], delimiter))
    histories = read_interactions(even, line="user", time=None, header=False)
    assert _told(histories) == {"u": [("i", 0), ("j", 1)], "v": [("j", 0), ("i", 1)]}
    named = read_interactions(even, line="user", time=None, header=True)
    assert _told(named) == {"v": [("j", 0), ("i", 1)]}


def test_two_lines_of_a_user_follow_each_other(tmp_path: Path) -> None:
    path = _text(tmp_path, "7 1 2\n3 1\n7 9\n")
    assert _told(read_interactions(path, line="user", time=None)) == {3: [(1, 0)], 7: [(1, 0), (2, 1), (9, 2)]}
    with pytest.raises(ValueError, match=r'line 2 has 2 values, the first line 3 .*line="user", time=None'):
        read_interactions(path, time=None)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("7 1 2\n\n3\n4\n", {"line": "user", "time": None}, r"line 3 and 1 more name a user and no item: leave them out"),
        ("7,1,2\n\n3,,5,6\n", {"line": "user", "time": None}, "line 3 has an empty value"),
        ("7 1 2\n3 1\n", {"line": "user"}, r"line=\"user\" with time='time': .*pass time=None"),
        (
            "7 1 2\n3 1\n",
            {"line": "user", "time": None, "user": 1},
            r"line=\"user\" with user=1, item='item': the user comes first",
        ),
        ("7 1 2\n3 1\n", {"line": "list", "time": None}, r"line='list': pass \"interaction\", or \"user\""),
        ("7 1 2\n3 1\n", {}, r"line 2 has 2 values, the first line 3 \(delimiter=' '\): mend .*line=\"user\", time=None"),
        ("user,item,time\n\n1,2,3\n1,2\n", {}, r"line 4 has 2 values, the first line 3 \(delimiter=','\): mend"),
        ("a b,c\nd e,f\n", {"user": 0, "item": 1, "time": None}, r"pass delimiter= one of ',' \(2 .*' ' \(2 values"),
        ("a,b\nc,d\n", {"user": 0, "item": 1, "time": None}, r"first line \['a', 'b'\] may be .* header=True or header=False"),
        ("a,B1,1\nb,2,2\nc,3,3\n", {"user": 0, "item": 1, "time": 2}, r"first line \['a', 'B1', '1'\] may be names or values"),
        ("a;b\nc;d\n", {"user": 0, "item": 1, "time": None}, r"has tab, comma, space or '::' .*'a;b': pass delimiter="),
        ("a,b\nc,d\n", {"delimiter": "|"}, r"has '\|' between values"),
        ("a,b\nc,d\n", {"delimiter": ""}, r"delimiter='': pass one or two bytes"),
        ("a,b\nc,d\n", {"delimiter": ":::"}, r"delimiter=':::': pass one or two bytes"),
        ("user,item,time\n1,2,3\n", {"header": False}, r"has no header \(header=False\), so there is no column 'user'"),
        ("1,2,3\n1,2,3\n", {"user": 0, "item": 1, "time": 3}, r"has no column 3, only \[0, 1, 2\]"),
        ("1,2,3\n1,2,3\n", {"user": 0, "item": 1, "time": -1}, r"has no column -1, only \[0, 1, 2\]"),
        ("1,2,3\n1,2,3\n", {"user": 0, "item": 1, "time": 1}, r"columns \[0, 1, 1\], of which two are the same"),
        ("user,item,user\n1,2,3\n", {"time": None}, r"has several columns 'user': give the number"),
        ("user,name\n1,2\n", {}, r"has no column 'item', only \['user', 'name'\]"),
        ("\n \n", {}, "is empty"),
    ],
)
def test_what_is_not_clear(text: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_interactions(_text(tmp_path, text), **options)


def test_what_is_not_clear_can_be_said(tmp_path: Path) -> None:
    path, columns = _text(tmp_path, "a b,c\nd e,f\n"), {"user": 0, "item": 1, "time": None}
    assert _told(read_interactions(path, **columns, delimiter=",", header=True)) == {"d e": [("f", 0)]}
    assert read_interactions(path, **columns, delimiter=" ", header=False).user_ids.tolist() == ["a", "d"]


def test_no_header_above_a_value_that_is_missing(tmp_path: Path) -> None:
    path = _text(tmp_path, "1,2,,5\n1,3,9,6\n")
    assert _told(read_interactions(path, user=0, item=1, time=3)) == {1: [(2, 5), (3, 6)]}


def test_a_line_that_the_first_look_cuts(tmp_path: Path) -> None:
    rows = [(number, 5, 6) for number in range(100_000, 110_000)]
    for name in ("rows.txt", "rows.txt.gz"):
        assert len(read_interactions(_text(tmp_path, _lines(rows, " "), name), user=0, item=1, time=2).items) == 10_000


def test_the_suffix_says_what_else_would_not_be_clear(tmp_path: Path) -> None:
    columns = {"user": 0, "item": 1, "time": None, "header": False}
    assert read_interactions(_text(tmp_path, "a b,c\nd e,f\n", "a.csv.gz"), **columns).user_ids.tolist() == ["a b", "d e"]
    assert read_interactions(_text(tmp_path, "a,b\tc\nd,e\tf\n", "a.tsv"), **columns).user_ids.tolist() == ["a,b", "d,e"]


def test_a_bad_line_beyond_the_first_ones(tmp_path: Path) -> None:
    text = "\nuser,item,time\n" + "\n1,2,3\n" * 20_000 + "1,2\n1\n"
    with pytest.raises(ValueError, match=r"row 20000 has 2 values, the first line 3 \(delimiter=','\): mend"):
        read_interactions(_text(tmp_path, text))


def test_a_delimiter_of_two_bytes_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _lines([(number, f"a:{number}", number) for number in range(200)], "::")
    for block in (64, 65, 66, 67):
        monkeypatch.setattr(raw_files_module, "_BLOCK", block)
        histories = read_interactions(_text(tmp_path, text), user=0, item=1, time=2)
        assert _told(histories) == {number: [(f"a:{number}", number)] for number in range(200)}


@pytest.mark.parametrize(
    "content", ["user,item,time\n1,2,3\n".encode("utf-16"), b"user,item,time\n1,\xff,3\n", bytes(range(256)) * 9]
)
def test_what_is_no_text(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"rows.csv"):
        read_interactions(tmp_path / "rows.csv")
    (tmp_path / "rows.csv").write_bytes(b"1 2\n2 \xff 3\n")
    with pytest.raises(ValueError, match=r"cannot be read .* neither text in UTF-8 nor Parquet"):
        read_interactions(tmp_path / "rows.csv", time=None)


class _Stream:
    """What exports an Arrow stream and is nothing else we know."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


class _Frame(_Stream):
    """As a data frame of pandas or polars: columns are chosen before they are converted."""

    def __init__(self, columns: dict[Any, list[Any]]) -> None:
        self.columns, self._values = list(columns), columns

    def to_numpy(self) -> None:
        raise AssertionError("the whole frame is not wanted")

    def __getitem__(self, names: list[Any]) -> _Stream:
        return _Stream(pa.table({str(name): self._values[name] for name in names}))


def test_frames_and_streams() -> None:
    users, items, times = map(list, zip(*ROWS))
    frame = _Frame({"title": [1, "mixed", None, 2, 3], "item": items, "user": users, "time": times})
    assert _told(read_interactions(frame)) == EXPECTED
    assert _told(read_interactions(frame, user=2, item="item", time=3)) == EXPECTED
    stream = _Stream(pa.table({"user": users, "item": items, "time": times}))
    assert _told(read_interactions(stream)) == EXPECTED
    assert _told(read_interactions(stream, user=0, item=1, time=2)) == EXPECTED
    with pytest.raises(ValueError, match=r"table has no column 'movie', only \['title', 'item', 'user', 'time'\]"):
        read_interactions(frame, item="movie")
    with pytest.raises(ValueError, match=r"the columns \['user', 'title', 'time'\] of the table are no Arrow columns"):
        read_interactions(frame, item="title")
    with pytest.raises(TypeError, match=r"interactions in a list: pass a path, a pandas or polars DataFrame"):
        read_interactions([1, 2])


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_real_frames(name: str) -> None:
    library = pytest.importorskip(name)
    users, items, times = map(list, zip(*ROWS))
    frame = library.DataFrame({"user": [f"u{user}" for user in users], "item": items, "time": times, "else": ["a"] * 5})
    assert _told(read_interactions(frame)) == {f"u{user}": told for user, told in EXPECTED.items()}
    frame = library.DataFrame({"user": users, "item": items, "time": np.array(times, "datetime64[s]").astype("datetime64[ms]")})
    told = {user: [(item, 1000 * time) for item, time in rows] for user, rows in EXPECTED.items()}
    assert _told(read_interactions(frame)) == told


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
        assert _told(read_interactions(source)) == {str(user): told for user, told in EXPECTED.items()}
        assert _told(read_interactions(source, user=0, item=1, time=2)) == {str(user): told for user, told in EXPECTED.items()}


@pytest.mark.parametrize("option", [{"delimiter": ","}, {"header": False}, {"line": "interaction"}])
def test_options_of_text_for_what_is_none(option: dict[str, Any], tmp_path: Path) -> None:
    table = pa.table({"user": [1], "item": [2], "time": [3]})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    for source, name in ((table, "table"), (tmp_path / "rows.parquet", "rows.parquet")):
        with pytest.raises(ValueError, match=f"say how a text file is written, and .*{name} is none: leave them out"):
            read_interactions(source, **option)


def test_other_ids_are_refused() -> None:
    table = pa.table({"user": [1.5], "item": [True], "time": [3], "list": [[1]]})
    with pytest.raises(ValueError, match=r"column 'item' of table holds bool, not integers or strings, such as True in row 0"):
        read_interactions(table, user="time", time=None)
    with pytest.raises(ValueError, match=r"column 'list' of table holds list<.*>, not integers or strings"):
        read_interactions(table, user="time", item="list", time=None)
    with pytest.raises(ValueError, match=r"column 'item' of table holds bool, not times, such as True in row 0"):
        read_interactions(table, item="time", time="item", user="user")
    with pytest.raises(ValueError, match=r"column 'user' of table holds double, not integers or strings, such as 1.5 in row 0"):
        read_interactions(table, item="time", time=None)


def test_the_data_module_passes_everything_on(tmp_path: Path) -> None:
    path = _text(tmp_path, "user|item|when\nu|i1|1\nu|i2|2\nu|i3|3\nu|i4|4\n")
    options = {"user": 0, "item": 1, "time": 2, "delimiter": "|", "header": True, "line": "interaction"}
    module = FreeScaleDataModule.from_interactions(path, **options)
    assert module.histories.item_ids.tolist() == ["i1", "i2", "i3", "i4"]
    histories = _text(tmp_path, "u i1 i2 i3 i4\nv i1 i2 i3 i4 i5\n")
    module = FreeScaleDataModule.from_interactions(histories, time=None, line="user", header=False)
    assert module.histories.lengths.tolist() == [4, 5]


def test_what_the_documentation_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of the section on interactions, with files and a frame as it says they are."""
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "docs" / "data.md").read_text().split("## From interactions")[1]
    block = section.split("```python")[1].split("```")[0]
    _text(tmp_path, "userId,movieId,rating,timestamp\n" + "1,2,3.5,4\n" * 4, "ratings.csv.gz")
    _text(tmp_path, "1::2::3::4\n1::2::3::5\n1::2::3::6\n1::2::3::7\n", "ratings.dat")
    _text(tmp_path, "0 1 2 3 4\n1 2 3 4 5 6\n", "train.txt")
    frame = pa.table(
        {"user_id": ["u"] * 4, "asin": ["a"] * 4, "date": ["1970-01-01", "1970-01-02", "1970-01-03", "1970-01-04"]}
    )
    exec(block, {"frame": frame})
    assert block.count("load(") == 4
