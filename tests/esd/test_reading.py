"""Reading ahead: in order, within its bytes, and nobody is left waiting when something goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from gpuherd.esd.lanes import Delivery, LanesStopped, ReadAhead


def piece(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def taken(delivery: Delivery) -> list[bytes]:
    return [each.tobytes() for each in delivery]


def reader(*deliveries: tuple[Delivery, list[bytes]]) -> threading.Thread:
    def read() -> None:
        for delivery, pieces in deliveries:
            delivery.fill(partial(map, piece, pieces))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def test_pieces_come_in_order_and_no_more_than_so_many_bytes_wait() -> None:
    ahead = ReadAhead(10)
    waiting, most, made = 0, 0, []

    def pieces() -> Iterator[npt.NDArray[np.uint8]]:
        for number in range(50):
            made.append(number)
            yield piece(bytes([number]) * 4)

    delivery = Delivery(ahead)
    thread = threading.Thread(target=delivery.fill, args=(pieces,), daemon=True)
    thread.start()
    for number, each in enumerate(delivery):
        assert each.tobytes() == bytes([number]) * 4
        waiting = len(made) - number - 1  # read and not yet taken; one more may be on its way into the queue
        most = max(most, waiting)
    thread.join(10)
    assert len(made) == 50
    assert most <= 2


def test_a_piece_larger_than_the_limit_comes_alone() -> None:
    ahead = ReadAhead(3)
    first, second = Delivery(ahead), Delivery(ahead)
    thread = reader((first, [b"123456"]), (second, [b"1", b"1234567"]))
    assert taken(first) == [b"123456"]
    assert taken(second) == [b"1", b"1234567"]
    thread.join(10)
    assert not thread.is_alive()


def test_what_is_discarded_makes_room_for_the_next() -> None:
    ahead = ReadAhead(2)
    unwanted, wanted = Delivery(ahead), Delivery(ahead)
    thread = reader((unwanted, [b"ab", b"cd", b"ef"]), (wanted, [b"gh", b"ij"]))
    unwanted.discard()
    unwanted.discard()
    assert taken(wanted) == [b"gh", b"ij"]
    wanted.discard()
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_comes_where_the_matrix_is_taken() -> None:
    ahead = ReadAhead(10)
    bad, good = Delivery(ahead), Delivery(ahead)

    def breaks() -> Iterator[npt.NDArray[np.uint8]]:
        yield piece(b"a")
        raise OSError("gone")

    bad.fill(breaks)
    good.fill(lambda: iter([piece(b"b")]))
    with pytest.raises(OSError, match="gone"):
        list(bad)
    bad.discard()
    assert taken(good) == [b"b"]


def test_stopping_wakes_the_reader_and_all_who_wait() -> None:
    ahead = ReadAhead(1)
    first, second = Delivery(ahead), Delivery(ahead)
    thread = reader((first, [b"a", b"b"]), (second, [b"c"]))
    ahead.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert ahead.stopped
    with pytest.raises(LanesStopped):
        list(first)
    with pytest.raises(LanesStopped):
        list(second)
