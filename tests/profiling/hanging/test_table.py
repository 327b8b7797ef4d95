"""From where ranks stand to who waits for whom."""

from __future__ import annotations

from typing import Any

from lightning_freescale.profiling.hanging.table import hang_document, hang_text, in_words, ranks_in_words


def _rank(rank: int, number: int | None = None, *, begun: int = 0, step: int | None = 12, **fields: Any) -> dict[str, Any]:
    """A rank that waits in exchange ``number`` of the world, or computes after it has begun some."""
    exchange = {"group": "world", "step": step, "number": number, "name": "all_reduce", "ranks": None, "moved_bytes": 2_500_000}
    return {
        "rank": rank,
        "step": step,
        "last_steps_s": [0.1, 0.12],
        "stage": "forward",
        "exchange": None if number is None else exchange,
        "since_s": 30.0 + rank,
        "place": "training_step (train.py:7)",
        "code": "loss = self.model(batch)",
        "threads": [],
        "exchanges_begun": {"world": begun if number is None else number + 1},
        **fields,
    }


def _told(*ranks: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    document = hang_document("rank 0 has ended no step for 30 s", ranks, 60.0)
    return document["exchanges"], hang_text(document)


def test_who_has_not_come() -> None:
    (exchange,), text = _told(_rank(0, 3), _rank(1, begun=3), _rank(2, 3), _rank(3, begun=5))
    assert exchange["waiting"] == [0, 2] and exchange["missing"] == [1] and exchange["unknown"] == []
    assert text.splitlines()[0].startswith("BubbleProfiler: rank 0 has ended no step for 30 s. Training is left alone")
    assert "rank 1 has not come to all_reduce (exchange 3 of step 12 in group world), in which ranks 0, 2 wait" in " ".join(
        text.split()
    )
    table = text.splitlines()[-3:]
    assert [line.split("  ")[0] for line in table] == ["ranks", "0, 2", "1, 3"], "ranks that stand alike are one row"
    assert "all_reduce of 2.5 MB (forward), at training_step (train.py:7): loss = self.model(batch)" in table[1]
    assert "0.100 to 0.120 s" in table[1] and "32.0 s" in table[1]


def test_a_rank_that_is_a_step_ahead_or_behind() -> None:
    (exchange,), _ = _told(_rank(0, 3), _rank(1, step=13), _rank(2, step=11, begun=9))
    assert exchange["missing"] == [2], "numbers begin anew in every step"


def test_ranks_that_wait_for_each_other() -> None:
    first = _rank(0, 0)
    second = _rank(1, 0)
    second["exchange"] = {**second["exchange"], "group": "2", "ranks": [0, 1]}
    second["exchanges_begun"] = {"2": 1}
    exchanges, text = _told(first, second)
    assert [(exchange["waiting"], exchange["missing"]) for exchange in exchanges] == [([1], [0]), ([0], [1])]
    assert "rank 0 is in all_reduce" in text and "rank 1 is in all_reduce" in text


def test_ranks_of_another_group_are_not_missed() -> None:
    first = _rank(0, 0)
    first["exchange"] = {**first["exchange"], "group": "2", "ranks": [0, 2]}
    first["exchanges_begun"] = {"2": 1}
    (exchange,), _ = _told(first, _rank(1), _rank(2))
    assert exchange["missing"] == [2]


def test_different_exchanges_in_the_same_place() -> None:
    other = _rank(1, 3)
    other["exchange"] = {**other["exchange"], "name": "broadcast"}
    (exchange,), text = _told(_rank(0, 3), other)
    assert exchange["names"] == {"all_reduce": [0], "broadcast": [1]}
    assert "the ranks call different exchanges" in text and "rank 1 calls broadcast" in " ".join(text.split())


def test_a_message_has_two_ends() -> None:
    ends = [_rank(0, 0), _rank(1, 0)]
    for end, name in zip(ends, ("send", "recv")):
        end["exchange"] = {**end["exchange"], "group": "world 0>1 7", "ranks": [0, 1], "name": name}
        end["exchanges_begun"] = {"world 0>1 7": 1}
    (exchange,), text = _told(*ends, _rank(2))
    assert exchange["missing"] == [] and "different" not in text
    assert "all ranks have come to send or recv" in text
    (exchange,), _ = _told(ends[0], _rank(1), _rank(2))
    assert exchange["missing"] == [1]


def test_all_have_come() -> None:
    _, text = _told(_rank(0, 3), _rank(1, 3))
    assert "all ranks have come to all_reduce" in text


def test_ranks_that_do_not_answer_and_that_have_ended() -> None:
    silent, ended = {"rank": 1, "silent": "process 7 on node3 has ended"}, {"rank": 2, "ended": True}
    (exchange,), text = _told(_rank(0, 3), silent, ended)
    assert exchange["unknown"] == [1] and exchange["missing"] == [2]
    assert "rank 1 cannot be asked, and rank 0 waits in all_reduce" in text
    assert "cannot be asked: process 7 on node3 has ended" in text
    assert "its training has ended" in text


def test_nobody_waits() -> None:
    exchanges, text = _told(_rank(0), _rank(1, step=None))
    assert exchanges == [] and len(text.splitlines()) == 4


def test_threads_that_exchange_in_the_background() -> None:
    thread = {
        "thread": "freescale-net",
        "exchange": "embedding exchange",
        "moved_bytes": 300,
        "since_s": 4.0,
        "place": "f (a.py:1)",
    }
    idle = {"thread": "freescale-b", "exchange": None, "moved_bytes": None, "since_s": None, "place": "g (b.py:2)"}
    _, text = _told(_rank(0, threads=[thread, idle]))
    assert "rank 0, thread freescale-net in embedding exchange of 0.3 kB for 4.0 s, at f (a.py:1)" in text
    assert "rank 0, thread freescale-b at g (b.py:2)" in text


def test_many_ranks_make_a_short_table() -> None:
    _, text = _told(*[_rank(rank, 3) for rank in range(255)], _rank(255))
    assert len(text.splitlines()) < 8 and "0-254" in text


def test_ranks_in_words() -> None:
    assert ranks_in_words([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert (in_words([3]), in_words([3, 4])) == ("rank 3", "ranks 3-4")
