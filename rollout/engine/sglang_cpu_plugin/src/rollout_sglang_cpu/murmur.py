"""The hash behind SGLang's seeded sampling in plain torch; its own needs Triton on a GPU or a kernel wheel.

MurmurHash3 x86-32 (Austin Appleby, public domain) over four 32-bit words: the seed's low and high word,
the position, the column.
"""

import torch

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hashes of shape (n, m), uint32.

    Args:
        seed: (n,), any integer type; read as 64 bits.
        positions: (n,), read as 32 bits.
        col_indices: (m,), read as 32 bits.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    hashed = torch.zeros((len(seed), 1), dtype=torch.int64, device=seed.device)
    for word in (seed, seed >> 32, positions.to(torch.int64)):
        hashed = _mix(hashed, (word & _MASK)[:, None])
    hashed = _mix(hashed, (col_indices.to(torch.int64) & _MASK)[None, :]) ^ 16
    hashed = _times(hashed ^ (hashed >> 16), 0x85EBCA6B)
    hashed = _times(hashed ^ (hashed >> 13), 0xC2B2AE35)
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _mix(hashed: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _times(_rotate(_times(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_times(_rotate(hashed ^ word, 13), 5) + 0xE6546B64) & _MASK


def _rotate(word: torch.Tensor, by: int) -> torch.Tensor:
    return ((word << by) | (word >> (32 - by))) & _MASK


def _times(word: torch.Tensor, factor: int) -> torch.Tensor:
    """The low 32 bits of a product: in halves, which stay within 64 bits."""
    return ((word & 0xFFFF) * factor + (((word >> 16) * factor & 0xFFFF) << 16)) & _MASK
