"""Two collectives under the names that torch 2.13 gave them, with any version of torch.

before torch 2.13              since torch 2.13 (which warns of the old names; 2.15 does not)
dist.all_gather_into_tensor    dist.all_gather_single
dist.reduce_scatter_tensor     dist.reduce_scatter_single
"""

import torch.distributed as dist

if hasattr(dist, "all_gather_single"):
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor
