"""Training of the head rows of actions alone: every other weight of the model stays as it is.

rows = ActionRows(decoder)            the only parameter: a copy of these rows
loss.backward()                       the head's gradient is cut to them, and freed
optimizer.step(); rows.merge()        and written back into the head
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graft.models.decoder import Decoder


def extra_rows(decoder: Decoder) -> Tensor:
    """[extra, D]: a view of the head's rows of actions beyond the vocabulary, without padding."""
    shape = decoder.shape
    return decoder.head_weight.detach()[shape.vocab_size : shape.vocab_size + shape.extra]


class ActionRows(nn.Module):
    """`rows` [extra, width], in the decoder's dtype, and its `bias` [extra] itself, if it has one.

    All other weights of the decoder are frozen.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        if not decoder.shape.extra:
            raise ValueError("the model has no head rows of actions, so nothing would be trained")
        self.rows = nn.Parameter(extra_rows(decoder).clone())
        self.bias = decoder.action_bias
        # in a list, so that it is not registered as a parameter of this module
        self._decoder = [decoder]
        decoder.requires_grad_(False)
        head = decoder.head_weight.requires_grad_(True)
        if self.bias is not None:
            self.bias.requires_grad_(True)
        head.register_post_accumulate_grad_hook(self._pass_gradient)

    @torch.no_grad()
    def _pass_gradient(self, head: Tensor) -> None:
        """Add the gradient of these rows to theirs, and free the head's."""
        grad, head.grad = head.grad, None
        if grad is None:
            return
        shape = self._decoder[0].shape
        own = grad[shape.vocab_size : shape.vocab_size + shape.extra]
        self.rows.grad = own.clone() if self.rows.grad is None else self.rows.grad + own

    @torch.no_grad()
    def merge(self) -> None:
        """Write the rows into the head, in place."""
        extra_rows(self._decoder[0]).copy_(self.rows)
