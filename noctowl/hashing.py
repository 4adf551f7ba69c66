"""Content hashes of weights: the identity of a base model, whatever folder or hub name it came from."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Raw little-endian bytes of a tensor in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def state_sha256(state: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None) -> str:
    """sha256 over names, dtypes, shapes and bytes of a state dict, and over JSON-able settings beside it.

    Entries are visited in the order of their names, so the order of the mapping does not matter.
    """
    digest = hashlib.sha256(json.dumps(dict(settings or {}), sort_keys=True).encode())
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
