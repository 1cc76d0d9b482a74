"""English that several places share; a view's own words stand in its file (View.words). (one, many): `n` decides.

A "block" to the reader is one page of the cache.
"""

WORDS = {
    # small parts
    "list.comma": ", ",
    "list.last": "{head} and {tail}",
    "others": ("{n:,} other", "{n:,} others"),
    "nobody": "nobody",
    "step": "step {step:,}",
    "blocks": ("{n:,} block", "{n:,} blocks"),
    "tokens": ("{n:,} token", "{n:,} tokens"),
    "requests": ("{n:,} request", "{n:,} requests"),
    "empty": "Nothing has run yet. Type a sentence and press play: it becomes request A.",
    # the sentence of a step
    "caption": "Step {step:,}: {facts}.",
    "caption.join": "{first}; {second}",
    "caption.empty": "Nothing has run yet.",
    "caption.failed": "Step {step:,} failed and ended {who}; everyone else goes on.",
    "caption.failed.nobody": "Step {step:,} failed; nobody was in it.",
    "caption.nothing": "nobody computed anything",
    "caption.only_waiting": ("{who} waits and nobody computed anything", "{who} wait and nobody computed anything"),
    "preempted.for": "{who} was preempted and gave {blocks} to {cause}",
    "preempted.self": "{who} found no free block and gave its {blocks} back",
    "preempted.knob": "{who} lost {blocks} to a changed knob",
    "preempted.many": "{who} were preempted and gave back {blocks}",
    "finished.freed": "{who} finished and freed {blocks}",
    "finished.gave_back": "{who} finished and gave back {blocks}, some shared",
    "finished.plain": "{who} finished",
    "finished.abort": "{who} was stopped and freed {blocks}",
    "finished.abort.gave_back": "{who} was stopped and gave back {blocks}, some shared",
    "finished.abort.plain": "{who} was stopped before it ran",
    "finished.error": "{who} ended with an error",
    "joined.whole": ("{who} joined with its {n:,} prompt token", "{who} joined with all {n:,} prompt tokens"),
    "joined.part": "{who} joined with {n:,} of {total:,} prompt tokens",
    "joined.hit": "{who} joined, found {cached} in the cache and computed {n:,}",
    "joined.many": "{who} joined with {n:,} prompt tokens",
    "joined.resumed": "{who} came back and recomputed {n:,} of {total:,} tokens",
    "joined.resumed.kept": "{who} came back, found {cached} of its own, recomputed {n:,}",
    "joined.forked": "{who} joined on the prompt of {parent}",
    "block.copy": "{who} got its own copy of block {page:,}",
    "block.new": ("{who} took a new block", "{who} took {n:,} new blocks"),
    "block.new.many": "{who} took {n:,} new blocks",
    "plain.token": "{who} got one token",
    "plain.token.many": "{who} each got one token",
    "plain.chunk": "{who} read {n:,} more prompt tokens ({done:,} of {total:,})",
    "plain.recompute": "{who} recomputed {n:,} more tokens",
    # why somebody waits
    "wait": "{who} waits: {why}",
    "wait.token_budget": "{need} to compute, the step has {left} left",
    "wait.token_budget.none": "the step's {budget:,} tokens are all given out",
    "wait.no_free_pages": "needs {need}, {free}",
    "wait.no_free_pages.run": "needs {need} in a row, the longest free run is {available:,}",
    "wait.free": ("{n:,} is free", "{n:,} are free"),
    "wait.free.none": "none is free",
    "wait.max_seqs": ("the only batch slot is taken", "all {n:,} batch slots are taken"),
    "wait.sibling_prompt": ("{parent} reads their prompt first ({n:,} token)", "{parent} reads their prompt first ({n:,} tokens)"),
    "wait.static_batch": ("the running batch must end first ({n:,} is left)", "the running batch must end first ({n:,} are left)"),
    "wait.queue_order": "{first} is before it in the queue",
    "wait.preemption": "{victim} just lost its blocks, so nobody joins",
    "wait.paused": "the room is paused",
    "wait.in_flight": "its last token is still on the device",
    "wait.unknown": "the scheduler gave it nothing",
    # how somebody ended
    "finish.stop": "wrote its end",
    "finish.length": ("reached its limit of {n:,} token", "reached its limit of {n:,} tokens"),
    "finish.length.room": ("ran out of room after {n:,} token", "ran out of room after {n:,} tokens"),
    "finish.abort": "was stopped",
    "finish.error": "ended with an error",
    # what can go wrong, by code
    "error.prompt_empty": "The prompt has no tokens; type at least one character.",
    "error.prompt_too_long": "The prompt has {num_tokens:,} tokens; this model reads at most {limit:,} and writes one more.",
    "error.prompt_exceeds_pool": "The prompt has {num_tokens:,} tokens and needs {needed:,} blocks; the whole cache has {num_pages:,}.",
    "error.bad_sampling": "{name} must be {rule}, got {value}.",
    "error.bad_config": "{name} must be {rule}, got {value}.",
    "error.unknown_knob": "There is no knob called “{name}”.",
    "error.no_cuda": "The device cuda was asked for, but this machine has no usable NVIDIA GPU.",
    "error.pool_too_large": "{num_pages:,} blocks of {page_bytes:,} bytes do not fit in the {free_bytes:,} bytes of free memory.",
    # the badge of a recording
    "badge.recorded": "{device}, {date}",
    "badge.recorded.nowhere": "unknown device",
}


def ordinal(n: int) -> str:
    """7 → "7th"."""
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n:,}{suffix}"
