"""Which member of a consumer group owns which partitions. Pure policy.

The unit is a number: partition i of every topic that the same members subscribe to goes to one member, so that the
lanes of an adapter meet the same caches. Members own equally many numbers, plus or minus one, and within that bound
as few numbers as possible change owner.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Member:
    """What a member subscribes to, and the partitions by topic that it owned in the assignment `epoch`."""

    topics: frozenset[str]
    owned: Mapping[str, Sequence[int]] = field(default_factory=dict)
    epoch: int = 0


Assignment = dict[str, dict[str, list[int]]]
"""Partitions by member and topic."""


def assign(counts: Mapping[str, int], members: Mapping[str, Member]) -> Assignment:
    """Assign every partition; `counts` are the partitions of each topic."""
    assignment: Assignment = {member: {} for member in members}
    owner_elsewhere: dict[int, str] = {}
    for topics, subscribers in _bundles(counts, members):
        numbers = range(max(counts[topic] for topic in topics))
        owners = _owners(numbers, topics, {name: members[name] for name in subscribers}, owner_elsewhere)
        for number, owner in owners.items():
            owner_elsewhere.setdefault(number, owner)
            for topic in topics:
                if number < counts[topic]:
                    assignment[owner].setdefault(topic, []).append(number)
    return assignment


def _bundles(counts: Mapping[str, int], members: Mapping[str, Member]) -> list[tuple[list[str], list[str]]]:
    """Topics with the same subscribers, and those subscribers; the fewest subscribers, with least choice, first."""
    bundles: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for topic in sorted(counts):
        subscribers = tuple(sorted(name for name, member in members.items() if topic in member.topics))
        if subscribers and counts[topic]:
            bundles[subscribers].append(topic)
    return [(topics, list(names)) for names, topics in sorted(bundles.items(), key=lambda each: len(each[0]))]


def _owners(
    numbers: Sequence[int], topics: Sequence[str], members: Mapping[str, Member], elsewhere: Mapping[int, str]
) -> dict[int, str]:
    """The owner of each number, in order of the numbers."""
    previous = _previous(numbers, topics, members)
    held = {name: [number for number in numbers if previous.get(number) == name] for name in members}
    quotas = _quotas(len(numbers), held)
    owners: dict[int, str] = {}
    for name, kept in held.items():
        # A number whose other lanes this member owns too is the last one that it gives up.
        kept.sort(key=lambda number: (elsewhere.get(number, name) != name, number))
        owners.update(dict.fromkeys(kept[: quotas[name]], name))
    room = {name: quota - min(quota, len(held[name])) for name, quota in quotas.items()}
    free = [number for number in numbers if number not in owners]
    for number in free:
        if room.get(wanted := elsewhere.get(number, ""), 0) > 0:
            owners[number] = wanted
            room[wanted] -= 1
    places = (name for name, count in room.items() for _ in range(count))
    for number in free:
        if number not in owners:
            owners[number] = next(places)
    return dict(sorted(owners.items()))


def _previous(numbers: Iterable[int], topics: Sequence[str], members: Mapping[str, Member]) -> dict[int, str]:
    """Who owned each number last: the highest epoch, then most of its lanes, then the first name."""
    claims: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, member in members.items():
        for topic in topics:
            for number in set(member.owned.get(topic, ())):
                claims[number][name] += 1
    return {
        number: min(claims[number], key=lambda name: (-members[name].epoch, -claims[number][name], name))
        for number in numbers
        if number in claims
    }


def _quotas(num_numbers: int, held: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """How many numbers each member gets; the members that hold most get the remainder, so that fewest move."""
    least, remainder = divmod(num_numbers, len(held))
    ranked = sorted(held, key=lambda name: (-len(held[name]), name))
    return {name: least + (rank < remainder) for rank, name in enumerate(ranked)}
