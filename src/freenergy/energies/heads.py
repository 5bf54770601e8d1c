"""Heads that turn a network's outputs into the potential of a whole sentence (section 3.3.1 of Ou 2024).

    hidden          U = Σ_i w · h_i (or the mean)            h by CNN, BLSTM, or CNN then BLSTM
    inner-product   U = Σ_{i<l} →h_i · e_{i+1} + Σ_{i>1} ←h_i · e_{i−1}      states meet the words next to them
    target-logit    U = Σ_i z(x_{<i})[x_i]                   logits of a causal network, not normalised
    masked-logit    U = Σ_i z(x with place i masked)[x_i]    l passes for l words: refused for long text unless asked
    token-logit     U = Σ_i z(x)[x_i]                        one pass, no mask

E = −s · U with a scale s that starts at 0, so training starts at the base. Padding does not change a number. A head is
an ``Energy`` of whole sentences: continuations of the empty context.

Legend: R sentences, T places, H width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.sequences import Continuations

Heads = Literal["hidden", "inner-product", "target-logit", "masked-logit", "token-logit"]
Encoders = Literal["cnn", "blstm", "cnn-blstm"]
_USED: dict[Heads, tuple[str, ...]] = {  # parts of each head; the others do not learn
    "hidden": ("encoder", "readout"),
    "inner-product": ("encoder.embedding", "forward_lstm", "backward_lstm"),
    "target-logit": ("encoder.embedding", "forward_lstm", "logits", "start"),
    "masked-logit": ("encoder", "logits", "mask_embedding"),
    "token-logit": ("encoder", "logits"),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """Which head, on which encoder, and how wide."""

    head: Heads = "hidden"
    encoder: Encoders = "blstm"  # of hidden, masked-logit and token-logit; the others have what they need
    width: int = 64
    layers: int = 1
    kernel: int = 3  # places that a convolution sees
    pool: Literal["sum", "mean"] = "sum"
    max_masked: int = 40  # words beyond which a masked-logit head refuses a sentence

    def __post_init__(self) -> None:
        check_range(self, "width", "layers", "max_masked", at_least=1)
        check_range(self, "kernel", at_least=1)
        if self.width % 2 or self.kernel % 2 == 0:
            raise UserError(f"width is {self.width} and kernel {self.kernel}: take an even width and an odd kernel")


class _Encoder(nn.Module):
    """Words to states of both sides, padding kept at zero so that it changes nothing."""

    def __init__(self, settings: HeadSettings, vocab_size: int) -> None:
        super().__init__()
        H = settings.width
        self.embedding = nn.Embedding(vocab_size, H)
        self.convolutions = nn.ModuleList()
        if "cnn" in settings.encoder:
            for _ in range(settings.layers):
                self.convolutions.append(nn.Conv1d(H, H, settings.kernel, padding=settings.kernel // 2))
        self.lstm = nn.LSTM(H, H // 2, settings.layers, batch_first=True, bidirectional=True)
        self.has_lstm = "blstm" in settings.encoder

    def forward(self, h: Float[Tensor, "R T H"], mask: Bool[Tensor, "R T"]) -> Float[Tensor, "R T H"]:
        h = h * mask.unsqueeze(-1)
        for convolution in self.convolutions:
            h = (h + convolution(h.transpose(1, 2)).transpose(1, 2).relu()) * mask.unsqueeze(-1)
        return both_ways(self.lstm, h, mask) if self.has_lstm else h


def both_ways(lstm: nn.LSTM, h: Float[Tensor, "R T H"], mask: Bool[Tensor, "R T"]) -> Float[Tensor, "R T H"]:
    """Run a bidirectional LSTM over sentences of several lengths."""
    lengths = mask.sum(1).clamp(min=1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
    out, _ = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=h.shape[1])
    return out * mask.unsqueeze(-1)


@final
class NeuralHead(nn.Module):
    """E(x) = −s · U(x) of whole sentences; U is one of the five heads."""

    def __init__(self, settings: HeadSettings, vocab_size: int) -> None:
        super().__init__()
        self.settings, self.vocab_size, H = settings, vocab_size, settings.width
        self.encoder = _Encoder(settings, vocab_size)
        self.forward_lstm = nn.LSTM(H, H, settings.layers, batch_first=True)
        self.backward_lstm = nn.LSTM(H, H, settings.layers, batch_first=True)
        self.readout = nn.Linear(H, 1)
        self.logits = nn.Linear(H, vocab_size)
        self.mask_embedding = nn.Parameter(torch.zeros(H))
        self.start = nn.Parameter(torch.zeros(H))
        self.scale = nn.Parameter(torch.zeros(()))
        for name, weight in self.named_parameters():
            weight.requires_grad_(name.startswith((*_USED[settings.head], "scale")))
        if not self.encoder.has_lstm:
            self.encoder.lstm.requires_grad_(False)

    def forward(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Return −s · U of the continuations; the context must be empty."""
        if x.contexts.tokens.shape[1] and int(x.contexts.lengths.max()):
            raise UserError("a head scores whole sentences: give continuations of the empty context")
        return (-self.scale * self.potential(x.tokens.flatten(0, 1), x.mask.flatten(0, 1))).view(x.shape)

    def potential(self, tokens: Int[Tensor, "R T"], mask: Bool[Tensor, "R T"]) -> Float[Tensor, " R"]:
        """Return U, before its scale."""
        match self.settings.head:
            case "hidden":
                states = self.encoder(self.encoder.embedding(tokens), mask)
                each = self.readout(states).squeeze(-1) * mask
                total: Tensor = each.sum(1)
                return total if self.settings.pool == "sum" else total / mask.sum(1).clamp(min=1)
            case "inner-product":
                return self._inner_product(tokens, mask)
            case "target-logit":
                return self._target_logit(tokens, mask)
            case "masked-logit":
                return self._masked_logit(tokens, mask)
            case "token-logit":
                states = self.encoder(self.encoder.embedding(tokens), mask)
                return (self._logit(states, tokens) * mask).sum(1)

    def _logit(self, states: Float[Tensor, "R T H"], tokens: Int[Tensor, "R T"]) -> Float[Tensor, "R T"]:
        """Return the logit of each given word, without forming V of them."""
        found: Tensor = (states * self.logits.weight[tokens]).sum(-1) + self.logits.bias[tokens]
        return found

    def _inner_product(self, tokens: Int[Tensor, "R T"], mask: Bool[Tensor, "R T"]) -> Float[Tensor, " R"]:
        e = self.encoder.embedding(tokens) * mask.unsqueeze(-1)
        ahead = self.forward_lstm(e)[0]
        # reversed by each sentence's own length, so that padding stays at the end
        place = (mask.sum(1, keepdim=True) - 1 - torch.arange(tokens.shape[1], device=tokens.device)).clamp(min=0)
        turn = place.unsqueeze(-1).expand_as(e)
        back = self.backward_lstm(e.gather(1, turn))[0].gather(1, turn)
        pair = (mask[:, 1:] & mask[:, :-1]).unsqueeze(-1)
        found: Tensor = ((ahead[:, :-1] * e[:, 1:] + back[:, 1:] * e[:, :-1]) * pair).sum((1, 2))
        return found

    def _target_logit(self, tokens: Int[Tensor, "R T"], mask: Bool[Tensor, "R T"]) -> Float[Tensor, " R"]:
        e = self.encoder.embedding(tokens)
        before = torch.cat([self.start.expand(len(e), 1, -1), e[:, :-1]], dim=1)
        return (self._logit(self.forward_lstm(before)[0], tokens) * mask).sum(1)

    def _masked_logit(self, tokens: Int[Tensor, "R T"], mask: Bool[Tensor, "R T"]) -> Float[Tensor, " R"]:
        """Mask every place in turn: R · T sentences in one batch."""
        longest = int(mask.sum(1).max()) if len(mask) else 0
        if longest > self.settings.max_masked:
            raise UserError(
                f"a masked-logit head reads a sentence of {longest} tokens {longest} times: set max_masked to at least "
                'that if you want it, or take head = "token-logit", which reads it once'
            )
        R, T = tokens.shape
        e = self.encoder.embedding(tokens).unsqueeze(1).expand(R, T, T, -1)
        here = torch.eye(T, dtype=torch.bool, device=tokens.device).view(1, T, T, 1)
        masked = torch.where(here, self.mask_embedding, e).reshape(R * T, T, -1)
        states = self.encoder(masked, mask.repeat_interleave(T, 0)).view(R, T, T, -1)
        own = states.diagonal(dim1=1, dim2=2).transpose(1, 2)
        return (self._logit(own, tokens) * mask).sum(1)
