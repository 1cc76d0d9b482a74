"""An independent answer for attention: fp64, query by query, only the keys that the query sees. Slow and obvious."""

from __future__ import annotations

import torch


def attention(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """out [t, Hq, Dv] and natural-log lse [t, Hq], both fp64, from the arguments of attention_ref."""
    q, k_cache, v_cache = (inputs[n].cpu().double() for n in ("q", "k_cache", "v_cache"))
    table, cu, lens = (inputs[n].cpu().tolist() for n in ("block_table", "cu_seqlens_q", "seq_lens"))
    window, softcap, sinks, tree = (inputs.get(n) for n in ("window", "softcap", "sinks", "tree"))
    t, hq, _ = q.shape
    page_size, hk = k_cache.shape[1:3]
    out = torch.zeros(t, hq, v_cache.shape[3], dtype=torch.float64)
    lse = torch.full((t, hq), -torch.inf, dtype=torch.float64)
    for s, length in enumerate(lens):
        for row in range(cu[s], cu[s + 1]):
            drafts = int(tree.lens[s]) if tree is not None else 0
            position = int(tree.positions[row]) if drafts else length - cu[s + 1] + row
            seen = [j for j in range(min(position + 1, length - drafts)) if window is None or j > position - window]
            seen += [length - drafts + i for i in range(drafts) if int(tree.mask[row]) >> i & 1]
            if not seen:
                continue
            k = torch.stack([k_cache[table[s][j // page_size], j % page_size] for j in seen])  # [keys, Hk, D]
            v = torch.stack([v_cache[table[s][j // page_size], j % page_size] for j in seen])
            for h in range(hq):
                x = inputs["scale"] * (k[:, h // (hq // hk)] @ q[row, h])
                if softcap is not None:
                    x = softcap * torch.tanh(x / softcap)
                with_sink = x if sinks is None else torch.cat([x, sinks[h : h + 1].cpu().double()])
                lse[row, h] = torch.logsumexp(with_sink, 0)
                out[row, h] = torch.softmax(with_sink, 0)[: len(seen)] @ v[:, h // (hq // hk)]
    return out, lse
