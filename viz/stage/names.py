"""Names that nobody has to think of: "Blue Heron" for a person, "amber-otter-417" for a room.

A name says nothing and opens nothing (links carry tokens for that); it only has to be easy to read out.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

FIRST = (
    "Amber", "Azure", "Blue", "Brave", "Bright", "Calm", "Clever", "Copper", "Coral", "Eager", "Gentle", "Golden", "Green", "Happy", "Ivory",
    "Jade", "Kind", "Lucky", "Merry", "Misty", "Olive", "Proud", "Quick", "Quiet", "Red", "Rosy", "Silver", "Sunny", "Swift", "Violet",
)  # fmt: skip
SECOND = (
    "Badger", "Bear", "Beaver", "Crane", "Deer", "Dolphin", "Eagle", "Falcon", "Finch", "Fox", "Gecko", "Hare", "Hawk", "Heron", "Ibis",
    "Koala", "Lark", "Lynx", "Marten", "Moose", "Otter", "Owl", "Panda", "Puffin", "Raven", "Robin", "Seal", "Swan", "Tiger", "Wren",
)  # fmt: skip


def person_name(taken: Collection[str] = ()) -> str:
    """A name that nobody else here has."""
    for _ in range(50):
        name = f"{secrets.choice(FIRST)} {secrets.choice(SECOND)}"
        if name not in taken:
            return name
    return f"{name} {secrets.randbelow(9000) + 1000}"


def fresh_room_name() -> str:
    return f"{secrets.choice(FIRST)}-{secrets.choice(SECOND)}-{secrets.randbelow(900) + 100}".lower()
