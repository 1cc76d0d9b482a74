"""What several kernel files need: argument checks that name the argument, and test inputs with NaN around them.

Deliberately knows no kernel. Rejected: asserts inside kernels (they cost registers and vanish in release builds);
silently calling `.contiguous()` on a bad argument (a hidden copy on the hot path, and wrong for outputs).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FENCE = 64  # elements of NaN before and after a test input


def check_tensor(
    name: str, x: torch.Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype] = FLOATS, packed: bool = True
) -> None:
    """Raise ValueError naming the argument unless x has this shape (None: any size), a type of `dtypes` and, when
    `packed`, a last dimension with stride 1."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    if x.dim() != len(shape) or any(want is not None and want != got for want, got in zip(shape, x.shape)):
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} has shape {list(x.shape)}, must be [{wanted}]")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has type {x.dtype}, must be {' or '.join(str(d) for d in dtypes)}")
    if packed and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension, must be 1")


def check_devices(**tensors: torch.Tensor) -> None:
    """All on the first one's device, else ValueError naming the argument that is elsewhere."""
    (first, reference), *others = tensors.items()
    for name, x in others:
        if x.device != reference.device:
            raise ValueError(f"{name} is on {x.device}, {first} on {reference.device}")


def check_written(name: str, x: torch.Tensor) -> None:
    """An argument written in place must not address one element twice (an expanded view)."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        raise ValueError(f"{name} is written in place and must not be an expanded view (stride 0)")


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def fenced(
    generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype, row_pad: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """Random normal [*shape] inside a larger NaN buffer: FENCE of them before and after, and `row_pad` NaN between the
    rows of the leading dimension. A kernel that reads or writes outside its argument meets them."""
    device, row = generator.device, 1
    for n in shape[1:]:
        row *= n
    stride = row + row_pad
    buffer = torch.full((2 * FENCE + shape[0] * stride,), float("nan"), dtype=dtype, device=device)
    strides = [stride]
    for n in shape[1:]:
        row //= max(n, 1)
        strides.append(row)
    x = buffer.as_strided(tuple(shape), tuple(strides), FENCE)
    x.copy_(torch.randn(tuple(shape), generator=generator, device=device, dtype=torch.float32) * scale)
    return x


def make_generator(device: str | torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)
