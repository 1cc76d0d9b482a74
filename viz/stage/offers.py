"""What a view offers to have done (Frame.offers), when somebody asks for it.

A browser names the view, the offer and the choice, nothing else. The view is rendered again for what this viewer looks
at, the offer is looked up there, and its own arguments go to the engine as the command of its job, through the same
gates, limits and rooms as any command. So a stranger can start no job that no picture offers, and none with arguments
of his own. The label that was pressed comes along only to notice that the picture has changed meanwhile.
Rejected: signed arguments in the page (a secret more, and what is offered could be kept and said again later).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from engine.trace import Trace
from viz.stage.refusal import Refused
from viz.view import Offer, View, ViewState, render

Act = Callable[[str, Mapping[str, object]], Awaitable[Mapping[str, object]]]


async def take_offer(view: View | None, trace: Trace, state: ViewState, said: Mapping[str, object], act: Act) -> Mapping[str, object]:
    """Do what `said` names: {"id": str, "choice": int, "label": str}. Raises Refused."""
    if view is None:
        raise Refused("unknown_view", "There is no view of that name.")
    frame = await asyncio.to_thread(render, view, trace, state)
    offer = next((o for o in frame.offers if o.id == said.get("id")), None)
    if offer is None:
        raise Refused("offer_gone", "The picture has changed and does not offer this any more. Choose again.")
    if offer.why:
        raise Refused("offer_greyed", offer.why)
    return await act(offer.job, chosen(offer, said.get("choice"), said.get("label")))


def chosen(offer: Offer, choice: object, label: object = None) -> Mapping[str, object]:
    """The arguments of a choice by its number; where its label is known and stands elsewhere now, by that. Raises Refused."""
    if type(choice) is int and 0 <= choice < len(offer.choices) and label in (None, offer.choices[choice][0]):
        return dict(offer.choices[choice][1])
    found = next((args for text, args in offer.choices if isinstance(label, str) and text == label), None)
    if found is None:
        raise Refused("offer_gone", "The picture has changed and does not offer this any more. Choose again.")
    return dict(found)
