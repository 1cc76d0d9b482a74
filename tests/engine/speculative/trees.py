"""Random draft trees, and several as one batch."""

import numpy as np
import torch
from hypothesis import strategies as st

from engine.speculative.device import DraftBatch
from engine.speculative.tree import ROOT, DraftTree


@st.composite
def trees(draw, most=20):
    """A tree of distinct siblings."""
    n = draw(st.integers(0, most))
    parents = [draw(st.integers(ROOT, i - 1)) for i in range(n)]
    probabilities = [draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])) for _ in range(n)]
    return DraftTree(draw(st.permutations(range(n))), np.array(parents, np.int64), np.array(probabilities))


def batch_of(some, room=None, q=None):
    """Trees with padding behind them, as a drafter would return them."""
    n = max(map(len, some)) if room is None else room

    def stacked(name, fill):
        return torch.from_numpy(np.stack([np.concatenate([x := getattr(t, name), np.full(n - len(x), fill, x.dtype)]) for t in some]))

    depth = max(int(t.depths.max(initial=0)) for t in some)
    width = max(len(t.children(node)) for t in some for node in range(ROOT, len(t)))
    lens = torch.tensor([len(t) for t in some])
    return DraftBatch(stacked("tokens", 0), stacked("parents", ROOT), stacked("probabilities", 1.0).float(), lens, depth, width, q)
