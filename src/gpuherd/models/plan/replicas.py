"""Over which of the cards a model can be laid more than once. Pure.

A replica takes the same device map as the first one, so that one map serves them all; the cards may differ as long as
what each must hold fits there.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.models.plan.card import Card
from gpuherd.models.plan.sizing import Sizing


def replicas_over(
    cards: Sequence[Card], first: Sequence[Card], needs: Sequence[int], sizing: Sizing
) -> list[tuple[Card, ...]]:
    """The cards of each replica, in the order of the map; those of ``first`` come first if that costs no replica.

    Args:
        cards: all that there are, linked neighbours side by side.
        first: cards on which the first replica was planned.
        needs: bytes for the blocks on each card of a replica, nothing reserved.
    """
    rest = [card for card in cards if card not in first]
    groups = max(_in_order(rest, needs, sizing), _matched(rest, needs, sizing), key=len)
    anew = _matched(cards, needs, sizing)
    return anew if len(anew) > 1 + len(groups) else [tuple(first), *groups]


def _in_order(cards: Sequence[Card], needs: Sequence[int], sizing: Sizing) -> list[tuple[Card, ...]]:
    """One group after the other of cards as they come: neighbours stay together."""
    groups: list[tuple[Card, ...]] = []
    group: list[Card] = []
    for card in cards:
        if sizing.room(card) >= needs[len(group)]:
            group.append(card)
        if len(group) == len(needs):
            groups.append(tuple(group))
            group = []
    return groups


def _matched(cards: Sequence[Card], needs: Sequence[int], sizing: Sizing) -> list[tuple[Card, ...]]:
    """As many groups as there can be: the roomiest cards for the largest needs."""
    by_room = sorted(cards, key=sizing.room, reverse=True)
    places = sorted(range(len(needs)), key=lambda place: needs[place], reverse=True)
    for count in range(len(cards) // len(needs), 0, -1):
        # Every card of the largest need, then every one of the second largest, ...
        taken = [by_room[position * count : (position + 1) * count] for position in range(len(needs))]
        if all(sizing.room(card) >= needs[place] for place, some in zip(places, taken, strict=True) for card in some):
            of_place = dict(zip(places, taken, strict=True))
            return [tuple(of_place[place][number] for place in range(len(needs))) for number in range(count)]
    return []
