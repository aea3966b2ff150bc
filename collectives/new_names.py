"""Two collectives under the names that torch 2.13 gave them, whichever torch this is.

before torch 2.13              since, where the old names warn
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
