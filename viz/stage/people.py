"""Who is in a room, and what each of them may do there: the host, guests with and without the right to prompt.

Whoever opens a room is its host. Others come by one of two links: the prompt link lets them add prompts, the watch
link does not; their tokens cannot be guessed and neither gives the host's rights, which belong to a person (the secret
that a tab keeps over a reload). The one room of a laptop has no opener: who comes without a link is a host there, so a
speaker has nothing to set up, until one of them claims the room. Private places ("~…") have no roles.

Everything is decided here, at the server: a `door` of the hub lets people in, a `gate` refuses what their role does
not allow, and a guest who follows is shown what the host looks at. Guests leave numbers behind, never secrets: nobody
is ever told another person's name for itself. Knows no engine: rooms end and begin in viz/stage/lobby.py.
Rejected: rights in the browser (a socket needs no page), one link whose rights the host switches (a copied link would
change under its owner).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial

from viz.stage.hub import Hub, Refused
from viz.stage.limits import Limits, Meter
from viz.stage.names import person_name
from viz.stage.viewer import Viewer
from viz.view import ViewState

OWN = ("theme", "language", "size", "source")  # what a follower keeps to himself
FOLLOWED = tuple(f.name for f in fields(ViewState) if f.name not in OWN)
FOR_GUESTS = frozenset({"prompt", "abort", "guess", "pin", "export", "save_recording", "people_accept"})
OPENS_A_ROOM = ("prompt", "preset", "live")
MAX_MEMBERS = 300  # of one room, those who are away among them


class Role(Enum):
    HOST = "host"
    GUEST = "guest"  # may prompt
    WATCHER = "watcher"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds. Host away: the room pauses, then somebody else is offered the role. Others who are away are forgotten."""

    pause_after: float = 60.0
    offer_after: float = 300.0
    forget_after: float = 600.0
    tick: float = 1.0


TIMES, NO_LIMITS = Times(), Limits()


@dataclass(eq=False)
class Member:
    """`key` is what others call it by."""

    person: str
    role: Role
    name: str
    key: str
    left_at: float  # or when it was let in
    viewers: list[Viewer] = field(default_factory=list)
    pending: int = 0  # prompts on their way to the engine

    @property
    def is_here(self) -> bool:
        return bool(self.viewers)


@dataclass(eq=False)
class Home:
    """A room as its people know it. `open_to_all`: who comes without a link is a host (a laptop); `claimed`: it was."""

    name: str
    open_to_all: bool
    claimed: bool = False
    empty_since: float | None = None
    members: dict[str, Member] = field(default_factory=dict)  # in the order of coming
    tokens: dict[Role, str] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    no_prompts: bool = False
    no_newcomers: bool = False
    hidden: set[int] = field(default_factory=set)
    lead: ViewState | None = None  # what guests follow
    said: dict[str, tuple] = field(default_factory=dict)  # connection of a host → what it last looked at
    away_since: float | None = None
    paused_for: bool = False  # because the host is away
    offered: str | None = None  # the person who may become host

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """New links: the old ones let nobody in any more."""
        self.tokens = {role: secrets.token_urlsafe(18) for role in (Role.GUEST, Role.WATCHER)}

    def role_of_link(self, token: str) -> Role | None:
        return next((role for role, known in self.tokens.items() if token and secrets.compare_digest(known, token)), None)

    @property
    def hosts(self) -> list[Member]:
        return [m for m in self.members.values() if m.role is Role.HOST]


class People:
    """Registers itself with a hub.

    Args:
        hub: its source may offer `opener(room) -> person`, `owned(room, person) -> live request ids`,
            `hide(room, request_ids)`, `touched(room)`, `is_open(room)`.
    """

    def __init__(self, hub: Hub, limits: Limits = NO_LIMITS, times: Times = TIMES, clock: Callable[[], float] = time.monotonic) -> None:
        self.hub, self.limits, self.times, self._clock = hub, limits, times, clock
        self.meter = Meter(limits, clock)
        self.homes: dict[str, Home] = {}
        self._keys = itertools.count(1)
        self._opened_from: dict[str, str] = {}  # room → address
        self._opening: Counter[tuple[str, str]] = Counter()  # (address, person) → commands under way that may open a room
        self._ticker: asyncio.Task | None = None
        hub.doors.append(self.door)
        hub.gates.append(self.gate)
        hub.entered.append(self.entered)
        hub.left.append(self.left)
        hub.heard_view.append(self.heard_view)
        hub.parts["people"] = self.part
        hub.handlers |= {"prompt": self.prompt, "preset": partial(self.open_with, "preset"), "live": partial(self.open_with, "live")}
        for name in ("remove", "lock", "hide", "offer", "accept", "claim"):
            hub.handlers[f"people_{name}"] = getattr(self, f"do_{name}")

    def home_of(self, room: str) -> Home:
        if room not in self.homes:
            opener = getattr(self.hub.source, "opener", lambda room: None)(room)
            home = self.homes[room] = Home(room, open_to_all=opener is None)
            if opener is not None:
                self._welcome(home, opener, Role.HOST)
        return self.homes[room]

    def member(self, viewer: Viewer) -> Member | None:
        """None in a private place."""
        home = self.homes.get(viewer.room)
        return home.members.get(viewer.person) if home else None

    def _welcome(self, home: Home, person: str, role: Role) -> Member:
        taken = {m.name for m in home.members.values()}
        member = home.members[person] = Member(person, role, person_name(taken), f"g{next(self._keys)}", self._clock())
        return member

    # ---- doors ----

    def door(self, viewer: Viewer, room: str) -> None:
        """May this viewer come in? Raises Refused."""
        if room.startswith("~"):
            return
        home = self.home_of(room)
        if viewer.person in home.removed:
            raise Refused("removed", "The host has removed you from this room. Type a sentence to start one of your own.")
        if viewer.person in home.members:
            return
        role = home.role_of_link(viewer.invite) or self._role_without_link(home)
        if role is None:
            raise Refused(
                "link_needed", "This room can only be entered with a link from its host. Ask for a new one, or start your own room."
            )
        if home.no_newcomers:
            raise Refused("room_locked", "The host has closed this room to newcomers. Ask the host to open it again.")
        self._make_space(home)
        self._welcome(home, viewer.person, role)

    def _make_space(self, home: Home) -> None:
        """Forget who has been away for longest, where a room has too many members. Raises Refused."""
        if len(home.members) < MAX_MEMBERS:
            return
        away = [m for m in home.members.values() if self._may_be_forgotten(home, m)]
        if not away:
            raise Refused("room_full", "Too many people are in this room. Try again later, or start your own room.")
        self._forget(home, min(away, key=lambda m: m.left_at))

    def _may_be_forgotten(self, home: Home, member: Member) -> bool:
        """Who is away and neither keeps the host's role nor waits for an answer."""
        keeps = member.role is Role.HOST and not home.open_to_all
        return not (member.is_here or keeps or member.pending or self._live(home, member))

    def _forget(self, home: Home, member: Member) -> None:
        del home.members[member.person]
        home.offered = None if home.offered == member.person else home.offered
        self._changed(home)

    def _role_without_link(self, home: Home) -> Role | None:
        """A claimed room that was left alone for long is everybody's again."""
        if home.claimed and home.empty_since is not None and self._clock() - home.empty_since > self.times.offer_after:
            home.open_to_all, home.claimed = True, False
            home.members.clear()
        return Role.HOST if home.open_to_all else Role.WATCHER if home.claimed else None

    def entered(self, viewer: Viewer) -> None:
        member, home = self.member(viewer), self.homes.get(viewer.room)
        if member is None:
            return
        member.viewers.append(viewer)
        viewer.follow, home.empty_since = True, None
        self._opened_from.setdefault(home.name, viewer.address)
        self._look_alike(home, viewer)
        self._changed(home)
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.ensure_future(self._tick())

    def left(self, viewer: Viewer) -> None:
        for home in self.homes.values():  # a viewer that moves is in the next room already
            for member in home.members.values():
                if viewer in member.viewers and (viewer.gone or viewer.room != home.name):
                    member.viewers.remove(viewer)
                    member.left_at = self._clock()
                    home.said.pop(viewer.id, None)
                    home.empty_since = None if any(m.is_here for m in home.members.values()) else self._clock()
                    self._changed(home)

    def _changed(self, home: Home) -> None:
        self.hub.touch(home.name)

    # ---- what may be asked for ----

    def gate(self, viewer: Viewer, name: str, args: Mapping[str, object]) -> None:
        """Raises Refused."""
        self.meter.check(viewer.person, name, args)
        home, member = self.homes.get(viewer.room), self.member(viewer)
        if viewer.room.startswith("~") or home is None:
            return self._check_opening(viewer, name)
        touched = getattr(self.hub.source, "touched", None)
        if touched is not None:
            touched(viewer.room)
        if member is None:
            raise Refused("not_here", "You are not in this room any more. Reload the page.")
        if member.role is Role.HOST:
            return
        if name not in FOR_GUESTS:
            raise Refused("host_only", "Only the host of this room may do that. You can scrub and choose views for yourself.")
        if name == "abort" and args.get("request_id") not in self._live(home, member):
            raise Refused("not_yours", "Only the host may stop somebody else's request. You can stop your own.")
        if name == "prompt":
            self._check_prompt(home, member)
            if not self.hub.source.status(home.name).get("live"):  # it would end what the host shows
                raise Refused("not_live", "The host is showing a recording. You can add a prompt when the room is live again.")

    def _check_prompt(self, home: Home, member: Member) -> None:
        if member.role is Role.WATCHER:
            raise Refused("watch_only", "Your link is for watching. Ask the host for the prompt link.")
        if home.no_prompts:
            raise Refused("prompts_locked", "The host takes no more prompts for now. You can go on watching.")
        most = self.limits.guest_live
        if len(self._live(home, member)) + member.pending >= most:
            raise Refused("two_alive", f"{most} of your prompts are alive already. Wait until one has finished, or stop it.", limit=most)

    def _check_opening(self, viewer: Viewer, name: str) -> None:
        most = self.limits.rooms_per_address
        if most is None or name not in OPENS_A_ROOM:
            return
        is_open = getattr(self.hub.source, "is_open", lambda room: True)
        mine = [r for r, address in self._opened_from.items() if address == viewer.address and r in self.homes and is_open(r)]
        inside = {person for r in mine for person in self.homes[r].members}
        coming = {person for address, person in self._opening if address == viewer.address} - inside
        if viewer.person not in inside | coming and len(mine) + len(coming) >= most:
            raise Refused("rooms_from_here", f"{most} rooms from your network are open already. Join one of them by its link.", limit=most)

    def _live(self, home: Home, member: Member) -> frozenset[int]:
        owned = getattr(self.hub.source, "owned", None)
        return frozenset() if owned is None else frozenset(owned(home.name, member.person))

    async def open_with(self, name: str, viewer: Viewer, args: Mapping[str, object]) -> Mapping[str, object]:
        """What may take its viewer to a new room. That room counts from before it is opened, so that two at once are two."""
        key = (viewer.address, viewer.person)
        self._opening[key] += 1
        try:
            return await self.hub.ask(viewer, name, args)
        finally:
            self._opening[key] -= 1
            self._opening += Counter()  # drops what is done

    async def prompt(self, viewer: Viewer, args: Mapping[str, object]) -> Mapping[str, object]:
        with self._pending(self.member(viewer)):
            reply = await self.open_with("prompt", viewer, args)
        member = self.member(viewer)
        if reply.get("queued") and reply.get("name") and member is not None and member.role is not Role.HOST:
            return {
                **reply,
                "code": "queued_paused",
                "sentence": f"Queued as {reply['name']}; the host has paused.",
                "fields": {"name": reply["name"]},
            }
        return reply

    @contextlib.contextmanager
    def _pending(self, member: Member | None) -> Iterator[None]:
        """Counts a prompt from before it is sent, so that two at once are two."""
        if member is not None:
            member.pending += 1
        try:
            yield
        finally:
            if member is not None:
                member.pending -= 1

    # ---- what the host does ----

    def _here(self, viewer: Viewer) -> tuple[Home, Member]:
        home, member = self.homes.get(viewer.room), self.member(viewer)
        if home is None or member is None:
            raise Refused("no_people_here", "You are alone here. Start a room first: type a sentence.")
        return home, member

    def _guest(self, home: Home, args: Mapping[str, object]) -> Member:
        found = next((m for m in home.members.values() if m.key == args.get("guest")), None)
        if found is None:
            raise Refused("unknown_guest", "This person is not in the room any more.")
        return found

    async def do_remove(self, viewer: Viewer, args: Mapping[str, object]) -> dict[str, object]:
        home, _ = self._here(viewer)
        guest = self._guest(home, args)
        if guest.role is Role.HOST:
            raise Refused("is_host", "A host cannot be removed.")
        del home.members[guest.person]
        home.removed.add(guest.person)
        home.renew()  # nor may he come back as somebody else by the link that he has
        if home.offered == guest.person:
            home.offered = None
        for request in self._live(home, guest):
            with contextlib.suppress(Exception):
                await self.hub.source.command(home.name, guest.person, "abort", {"request_id": request})
        for its in tuple(guest.viewers):
            its.invite = ""
            await self.hub.turn_out(
                its, "The host has removed you from this room. Type a sentence to start one of your own.", code="removed"
            )
        guest.viewers.clear()
        self._changed(home)
        return {"ok": True, "name": guest.name}

    async def do_lock(self, viewer: Viewer, args: Mapping[str, object]) -> dict[str, object]:
        """{"prompts": bool, "door": bool}: what is left out stays as it is."""
        home, _ = self._here(viewer)
        home.no_prompts = _said(args, "prompts", home.no_prompts)
        home.no_newcomers = _said(args, "door", home.no_newcomers)
        self._changed(home)
        return {"ok": True, "prompts": home.no_prompts, "door": home.no_newcomers}

    async def do_hide(self, viewer: Viewer, args: Mapping[str, object]) -> dict[str, object]:
        """{"request_id": int, "on": bool}: prompt and output of a request, for everybody and in what is saved."""
        home, _ = self._here(viewer)
        request, hide = args.get("request_id"), getattr(self.hub.source, "hide", None)
        if type(request) is not int or hide is None:
            raise Refused("bad_request", "The request to hide is not known.")
        (home.hidden.add if _said(args, "on", True) else home.hidden.discard)(request)
        hide(home.name, frozenset(home.hidden))
        for its in self.hub.in_room(home.name):
            its.dirty = True
        self._changed(home)
        return {"ok": True}

    async def do_offer(self, viewer: Viewer, args: Mapping[str, object]) -> dict[str, object]:
        home, _ = self._here(viewer)
        guest = self._guest(home, args)
        home.offered = guest.person
        self._changed(home)
        return {"ok": True, "name": guest.name}

    async def do_accept(self, viewer: Viewer, args: Mapping[str, object]) -> dict[str, object]:
        home, member = self._here(viewer)
        if home.offered != viewer.person:
            raise Refused("not_offered", "Nobody offers you the host's role now.")
        self._make_host(home, member)
        return {"ok": True, "sentence": "You are the host now.", "code": "you_host"}

    async def do_claim(self, viewer: Viewer, args: Mapping[str, object]) -> dict[str, object]:
        """In a room where everybody is a host: from now on only this person is."""
        home, member = self._here(viewer)
        if not home.open_to_all:
            raise Refused("has_host", "This room has a host already.")
        self._make_host(home, member)
        return {"ok": True, "sentence": "You are the host now. Others need a link to prompt.", "code": "you_claimed"}

    def _make_host(self, home: Home, member: Member) -> None:
        for other in home.hosts:
            other.role = Role.GUEST
        home.claimed = home.claimed or home.open_to_all  # such a room is everybody's again when it was left alone
        member.role, home.open_to_all = Role.HOST, False
        home.offered, home.away_since, home.paused_for, home.lead = None, None, False, None
        home.said.clear()
        for viewer in member.viewers:
            self.heard_view(viewer)
        self._changed(home)

    # ---- following ----

    def heard_view(self, viewer: Viewer) -> None:
        """Somebody looks at something else: the host leads, who follows is shown the same."""
        home, member = self.homes.get(viewer.room), self.member(viewer)
        if member is None:
            return
        touched = getattr(self.hub.source, "touched", None)
        if member.role is not Role.HOST:
            return self._look_alike(home, viewer)
        looks = tuple(getattr(viewer.state, name) for name in FOLLOWED)
        before = home.said.get(viewer.id)
        alone = len(home.said) == 0 or home.lead is None
        home.said[viewer.id] = looks
        if before == looks or (before is None and not alone):
            return
        home.lead = viewer.state
        if touched is not None:
            touched(home.name)
        for member in home.members.values():
            for its in member.viewers:
                self._look_alike(home, its)
        self._changed(home)

    def follows(self, viewer: Viewer) -> bool:
        member, home = self.member(viewer), self.homes.get(viewer.room)
        return member is not None and member.role is not Role.HOST and viewer.follow and home.lead is not None

    def _look_alike(self, home: Home, viewer: Viewer) -> None:
        if not self.follows(viewer):
            return
        state = viewer.state.with_(**{name: getattr(home.lead, name) for name in FOLLOWED})
        if state != viewer.state:
            viewer.state, viewer.dirty = state, True
            viewer.wake.set()

    # ---- what each is told ----

    def part(self, viewer: Viewer) -> dict[str, object] | None:
        """Plain JSON. Links only for who may hand them out; `join` is the token for this person's own address."""
        home, me = self.homes.get(viewer.room), self.member(viewer)
        if me is None:
            return None
        host = me.role is Role.HOST
        following = self.follows(viewer)
        said = {
            "room": home.name,
            "role": me.role.value,
            "me": me.name,
            "count": sum(m.is_here for m in home.members.values()),
            "everyone_hosts": home.open_to_all,
            "people": [self._person(m, me) for m in home.members.values() if m.is_here or (host and m.role is not Role.HOST)],
            "locked": {"prompts": home.no_prompts, "door": home.no_newcomers},
            "hidden": sorted(home.hidden),
            "away": home.away_since is not None and home.paused_for,
            "offered": home.offered == viewer.person,
            "following": following,
            "lead": {name: _plain(getattr(home.lead, name)) for name in FOLLOWED} if following else None,
            "join": "" if home.open_to_all and host else home.tokens[Role.WATCHER if host else me.role],
        }
        if host:
            said["links"] = {"prompt": home.tokens[Role.GUEST], "watch": home.tokens[Role.WATCHER]}
        return said

    def _person(self, member: Member, me: Member) -> dict[str, object]:
        return {"id": member.key, "name": member.name, "role": member.role.value, "here": member.is_here, "me": member is me}

    # ---- time ----

    async def _tick(self) -> None:
        """While somebody is in a room: is its host?"""
        while any(m.is_here for home in self.homes.values() for m in home.members.values()):
            await asyncio.sleep(self.times.tick)
            for home in tuple(self.homes.values()):
                with contextlib.suppress(Exception):
                    await self._look_after(home)
            self._tidy()

    async def _look_after(self, home: Home) -> None:
        here = [m for m in home.members.values() if m.is_here]
        if any(m.role is Role.HOST for m in here) or not here:
            if home.away_since is not None:
                home.away_since, home.paused_for = None, False
                home.offered = None
                self._changed(home)
            return
        now = self._clock()
        home.away_since = now if home.away_since is None else home.away_since
        away = now - home.away_since
        if away >= self.times.pause_after and not home.paused_for:
            home.paused_for = True
            await self.hub.source.command(home.name, "", "pause", {})
            self._changed(home)
        if away >= self.times.offer_after and home.offered not in {m.person for m in here}:
            home.offered = here[0].person
            self._changed(home)

    def _tidy(self) -> None:
        """Forget members who are away, and rooms that have ended."""
        late = self._clock() - self.times.forget_after
        for home in self.homes.values():
            for member in tuple(home.members.values()):
                if member.left_at < late and self._may_be_forgotten(home, member):
                    self._forget(home, member)
        is_open = getattr(self.hub.source, "is_open", None)
        for name, home in tuple(self.homes.items()):
            if is_open is not None and not is_open(name) and not any(m.is_here for m in home.members.values()):
                del self.homes[name]
                self._opened_from.pop(name, None)


def _said(args: Mapping[str, object], name: str, otherwise: bool) -> bool:
    return args[name] if isinstance(args.get(name), bool) else otherwise


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
