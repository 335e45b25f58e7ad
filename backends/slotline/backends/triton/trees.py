"""Trees of drafts for the kernels: where a launch reads how many nodes requests have, and what these see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slotline.registry.contracts.attention import AttentionBatch, TreeMask


class Nodes(NamedTuple):
    """Arguments of kernels over latents that mask keys by a tree.

    `counts` [requests] int32 are the nodes of each request, and `sees` [nodes, nodes] uint8 which nodes are on a node's
    path, [requests, nodes, nodes] if each request has a tree of its own. `row` is `most`, the number of nodes, then,
    else 0.
    """

    counts: torch.Tensor
    sees: torch.Tensor
    most: int
    row: int


def nodes_of(batch: AttentionBatch, device: str) -> Nodes | None:
    """Return the arguments for a batch's tree, None if it has none."""
    if (tree := batch.tree) is None:
        return None
    most = tree.depths.shape[-1]
    return Nodes(node_counts(tree, device), tree.sees.view(torch.uint8), most, most if tree.depths.ndim > 1 else 0)


def node_counts(tree: TreeMask, device: str) -> torch.Tensor:
    """Return the nodes of each request on the device, [requests] int32."""
    return uploaded(tree.num_nodes, device) if tree.num_nodes_device is None else tree.num_nodes_device


def uploaded(array: npt.NDArray[np.int32], device: str) -> torch.Tensor:
    """Copy to the device without waiting, from pinned memory, which is kept until the copy is done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.startswith("cuda") else tensor.to(device)
