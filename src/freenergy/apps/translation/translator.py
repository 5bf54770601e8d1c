"""An encoder–decoder as a network: q(y | x) of a translation y of a sentence x.

    q(y | x) = Π_t softmax(f(· ; encoder(x), y_<t))[y_t],      y_0 = start,      y ends with EOS

A draw is ancestral: exact, with the decoder's keys and values kept and the source encoded once. It ends at EOS or is
cut after L tokens. As in E-ARM (appendix C) the length of a draw depends on its source, which has S tokens:

    L = min(length, 2·S + 10, places that the network has)

Any encoder–decoder of transformers does; ``build`` makes a BART with fresh weights. Padding is defined by masks alone,
so no token of the vocabulary is spent on it.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig, PreTrainedModel

from freenergy.apps.translation.settings import TranslationSettings
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.lm.networks.causal import inference

_TIMES, _MORE = 2, 10  # a draw has at most _TIMES · source length + _MORE tokens


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Sentences to translate, each with its EOS: the input of a translator."""

    tokens: Int[Tensor, "rows S"]
    mask: Bool[Tensor, "rows S"]

    def to(self, device: torch.device) -> "Source":
        """Return the same on a device."""
        return Source(self.tokens.to(device), self.mask.to(device))

    def repeated(self, times: int) -> "Source":
        """Repeat every sentence ``times`` times."""
        return Source(self.tokens.repeat_interleave(times, 0), self.mask.repeat_interleave(times, 0))


@final
class Translator:
    """A Hugging Face encoder–decoder, for the task and the decoders."""

    def __init__(self, model: PreTrainedModel, *, eos: int) -> None:
        start = getattr(model.config, "decoder_start_token_id", None)
        if not model.config.is_encoder_decoder or not isinstance(start, int):
            raise UserError(
                f"a {type(model).__name__} is not an encoder–decoder with a start token: give a model "
                "of AutoModelForSeq2SeqLM with decoder_start_token_id in its config"
            )
        self.module: nn.Module = model
        self.model: Any = model
        self.eos, self.start, self.vocab_size = eos, start, int(model.config.vocab_size)

    def logits(self, given: Any, tokens: Int[Tensor, "rows T"]) -> Float[Tensor, "rows T V"]:
        """Return at position t the logits of token t, given the source and tokens 0 … t − 1."""
        given, tokens = given.to(self.model.device), tokens.to(self.model.device)
        out = self.model(
            input_ids=given.tokens,
            attention_mask=given.mask.long(),
            decoder_input_ids=self._started(tokens[:, :-1]),
            use_cache=False,
        )
        logits: Tensor = out.logits
        return logits

    def draw(
        self, given: Any, known: Int[Tensor, "rows P"], length: int, rng: Rng
    ) -> tuple[Int[Tensor, "rows K"], Bool[Tensor, "rows K"]]:
        """Draw at most L tokens after the known ones from q; returns them and their mask, up to and including EOS."""
        given, known = given.to(self.model.device), known.to(self.model.device)
        limit = self.longest(given, length, known.shape[1])
        ended, streams = (known == self.eos).any(1), rng.rows(len(known), 1, int(limit.max()))
        end = torch.full((len(known), 1, self.vocab_size), -torch.inf, dtype=self.model.dtype, device=known.device)
        end[:, :, self.eos] = 0.0  # what a row draws that has ended
        read, left, tokens, mask = self._started(known), torch.arange(len(known), device=known.device), [], []
        with inference(self.model), torch.no_grad():
            reader = _Reader(self.model, given)
            for place in range(int(limit.max())):
                logits = end.index_copy(0, left, reader.read(read))
                drawn = torch.where(ended, self.eos, streams.categorical(logits)[:, 0])
                tokens.append(drawn)
                mask.append(~ended)
                ended = ended | (drawn == self.eos) | (place + 1 >= limit)
                if ended.all():
                    break
                going = (~ended[left]).nonzero().squeeze(1)
                reader.keep(going)
                left = left[going]
                read = drawn[left].unsqueeze(1)
        return torch.stack(tokens, 1), torch.stack(mask, 1)

    def decode(self, given: Source, length: int, *, beams: int) -> tuple[Int[Tensor, "rows K"], Bool[Tensor, "rows K"]]:
        """Return the best translation of a beam search (one beam is greedy), in the form of a draw."""
        given = given.to(self.model.device)
        settings = GenerationConfig(
            max_new_tokens=int(self.longest(given, length).max()),
            num_beams=beams,
            do_sample=False,
            # True would stop at the first finished beams of any quality, and find worse strings than greedy search
            early_stopping=False if beams > 1 else None,
            eos_token_id=self.eos,
            pad_token_id=self.eos,
            decoder_start_token_id=self.start,
        )
        with inference(self.model), torch.no_grad():
            found = self.model.generate(
                input_ids=given.tokens, attention_mask=given.mask.long(), generation_config=settings
            )
        tokens: Tensor = found[:, 1:]  # without the start
        is_end = tokens == self.eos
        return tokens, is_end.cumsum(1) - is_end.long() == 0

    def longest(self, given: Source, length: int, known: int = 0) -> Int[Tensor, " rows"]:
        """L of every row: how many tokens a translation may have."""
        places = getattr(self.model.config, "max_position_embeddings", None) or length + known
        if min(length, places - known) < 1:
            raise UserError(
                f"{length} tokens after {known} known ones do not fit a network of {places} places: set the length to "
                "1 or more and the places of the network higher"
            )
        return (_TIMES * given.mask.sum(1) + _MORE).clamp(max=min(length, places - known))

    def _started(self, tokens: Int[Tensor, "rows P"]) -> Int[Tensor, "rows P_plus_one"]:
        return torch.nn.functional.pad(tokens, (1, 0), value=self.start)


@final
class _Reader:
    """The decoder state of some rows, whose sources are encoded; rows can be dropped."""

    def __init__(self, model: Any, given: Source) -> None:
        self.model, self.mask = model, given.mask.long()
        self.cache: Any = None
        self.encoded = model.get_encoder()(input_ids=given.tokens, attention_mask=self.mask)

    def read(self, tokens: Int[Tensor, "rows new"]) -> Float[Tensor, "rows 1 V"]:
        out = self.model(
            encoder_outputs=self.encoded,
            attention_mask=self.mask,
            decoder_input_ids=tokens,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache = out.past_key_values
        logits: Tensor = out.logits[:, -1:]
        return logits

    def keep(self, rows: Int[Tensor, " kept"]) -> None:
        if len(rows) < len(self.mask):
            self.cache.batch_select_indices(rows)
            self.mask, self.encoded.last_hidden_state = self.mask[rows], self.encoded.last_hidden_state[rows]


def build(settings: TranslationSettings, *, vocab_size: int, eos: int, rng: Rng) -> Translator:
    """Build a BART with fresh weights and one embedding for both languages and the output."""
    config = BartConfig(
        vocab_size=vocab_size,
        d_model=settings.width,
        encoder_layers=settings.layers,
        decoder_layers=settings.layers,
        encoder_attention_heads=settings.heads,
        decoder_attention_heads=settings.heads,
        encoder_ffn_dim=settings.feedforward,
        decoder_ffn_dim=settings.feedforward,
        dropout=settings.dropout,
        max_position_embeddings=settings.longest,
        pad_token_id=None,
        bos_token_id=eos,
        eos_token_id=eos,
        decoder_start_token_id=eos,
        forced_eos_token_id=None,  # a translation that is cut has no end
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(rng.integer())
        model = BartForConditionalGeneration(config)
    return Translator(model, eos=eos)
