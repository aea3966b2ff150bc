"""Windows with several documents: the borders between them, and which tokens count in the loss.

A window is cut from a row of documents. With --document-masks, a token attends to tokens of its
own document only, and the first token of a document is not predicted from the one before. In
GPT-2's table the positions start again with each document, as in Hugging Face's
DataCollatorWithFlattening and with Megatron-LM's --reset-position-ids; rotary positions act only
through differences within a document, which stay. So a document that no window cuts has the
losses that it has alone.

One tensor tells all: the targets are `IGNORED` where the next token begins another document, and
`UNCOUNTED` where the next token is of the same document, but not to be learned (a prompt: chat.py).
"""

import torch
import torch.distributed as dist
from config import Settings
from torch import Tensor

IGNORED, UNCOUNTED = -100, -101  # no targets: `cross_entropy` leaves out what is below 0


def document_starts(y_BT: Tensor, settings: Settings) -> Tensor | None:
    """For each token the index in its window where its document begins: (B, T), int64.

    None without --document-masks: a window is then one text. y_BT: targets, full windows.
    """
    if not settings.document_masks:
        return None
    positions_T = torch.arange(y_BT.shape[1], device=y_BT.device)
    begins_BT = (y_BT == IGNORED).roll(1, dims=1)  # after an ignored target; index 0 is 0 anyway
    return torch.where(begins_BT, positions_T, 0).cummax(dim=1).values


def tokens_per_rank(y_BT: Tensor, settings: Settings) -> Tensor | int:
    """All ranks call this. The mean number, over all ranks, of targets that count.

    The loss of a batch is the mean over the counted tokens of ALL ranks. With masks a rank has more
    of them than another one: a mean of each rank's mean would weigh them wrongly. FSDP averages
    gradients over ranks: if each rank divides its sum of losses by this number, the average is the
    sum over all ranks divided by the count of all ranks.
    """
    if not settings.document_masks:
        return y_BT.numel()  # equal on all ranks
    count = (y_BT >= 0).sum().float()
    dist.all_reduce(count)  # ranks that share a model count the same tokens equally often
    return count.clamp(min=1) / dist.get_world_size()  # a batch of prompts has a loss of 0
