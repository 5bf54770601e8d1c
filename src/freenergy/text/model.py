"""The residual model: a language model and an energy that corrects it.

    P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c),      log_score = log_base − energy = log P(x | c) + log Z(c)

``log_score`` ranks continuations of one context exactly, since Z(c) is the same for all of them; between contexts it
does not compare. The pair is saved in one folder, in Hugging Face's manner, with a model card.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, final

from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, overwritable_folder, read_json, write_json, write_text
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Energy, LanguageModel, Target
from freenergy.core.scored import Law, Scored
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import Truncation
from freenergy.corpus import Tokenizer
from freenergy.corpus.tokenize_pair import join
from freenergy.energies.module import Persistent
from freenergy.energies.registry import load_energy
from freenergy.lm.load import load_lm, save_lm
from freenergy.lm.sample_only import has_log_prob
from freenergy.models.residual import Residual, no_energy
from freenergy.partition.next_token import next_token
from freenergy.samplers.resampling import Resampling
from freenergy.samplers.sampled import SILENT, Sampler, drive
from freenergy.text.model_card import model_card
from freenergy.text.ranking import Ranking
from freenergy.text.scoring import CELLS, score_in_batches
from freenergy.text.texts import NextTable, Texts
from freenergy.text.write import Added, Event, Generation, OnChunk, TextPlan, Writing, generate, stream

RECORD = "joint.json"


@final
class ResidualModel:
    """P(x | c) ∝ P_LM(x | c) · exp(−E(c, x))."""

    def __init__(
        self,
        base: LanguageModel,
        energy: Energy,
        tokenizer: Tokenizer | None = None,
        *,
        space: SequenceSpace | None = None,
        max_context: int | None = None,
        text_length: int | None = None,
    ) -> None:
        self.residual = Residual(base, energy.eval() if isinstance(energy, nn.Module) else energy)
        self.tokenizer = tokenizer
        self.space = space  # of the continuations that the energy was trained on
        self.max_context = max_context  # tokens before them that it was trained with
        self.text_length = text_length  # tokens of a text, where the energy was trained on chunks of it

    @property
    def base(self) -> LanguageModel:
        """P_LM."""
        return self.residual.base

    @property
    def energy(self) -> Energy:
        """E."""
        return self.residual.energy

    @property
    def has_energy(self) -> bool:
        """Whether it is more than its base."""
        return self.energy is not no_energy

    def scored(self, x: Continuations, *, allow_inf: bool = False) -> Scored:
        """log P_LM and E of each continuation; with ``allow_inf`` an energy may be +inf, and is refused otherwise."""
        return self.residual.scored(x, allow_inf=allow_inf)

    def log_score(self, x: Continuations) -> Float[Tensor, "B N"]:
        """log P_LM(x | c) − E(c, x): ranks the continuations of one context, exactly."""
        return self.scored(x).log_score

    def score(
        self,
        prefix: str,
        candidates: Sequence[str],
        *,
        ends: bool = False,
        max_tokens: int | None = None,
        max_cells: int = CELLS,
        progress: Progress = SILENT,
    ) -> Ranking:
        """Rank texts as continuations of a prefix, exactly; an empty prefix is the start of a document.

        With ``ends`` each candidate is scored as a text that ends there (EOS is its last token). Without it a candidate
        may go on, so a longer one is a narrower claim and seldom has the higher score. More than ``max_tokens`` in all
        candidates are refused; ``max_cells`` tokens, with padding, are read per call of the models.
        """
        tokenizer = self._tokenizer_for("ranking texts")
        if isinstance(candidates, str) or not candidates:
            raise UserError("there is no list of candidates to rank: give one text or more, as in ['one', 'another']")
        with progress.track("encoding", len(candidates), "texts") as advance:
            joined = join(tokenizer, prefix, candidates, end=[tokenizer.eos] if ends else [], advance=advance)
        xs = [tuple(text.tokens) for text in joined.texts]
        if max_tokens is not None and (total := sum(map(len, xs))) > max_tokens:
            raise UserError(f"the candidates have {total} tokens: give at most {max_tokens} in all")
        log_base, energy = score_in_batches(self.residual, joined.context, xs, max_cells=max_cells, progress=progress)
        return Ranking.of(prefix, candidates, joined, log_base, energy, has_log_prob=has_log_prob(self.base))

    def sample(
        self,
        prefix: str,
        *,
        n: int = 1,
        candidates: int | None = None,
        truncation: Truncation | None = None,
        law: Law | None = None,
        sampler: Sampler | None = None,
        length: int | None = None,
        chunks: int | None = None,
        look_ahead: int = 0,
        seed: int = 0,
        progress: Progress = SILENT,
    ) -> Texts:
        """``n`` texts that continue a prefix, each chosen among ``candidates`` (256) by weight; see docs/writing.md.

        ``candidates``, ``truncation`` and ``law`` are settings of resampling; any other ``sampler`` has its own. An
        energy that was trained on chunks writes chunk by chunk. The texts are those of ``freenergy sample`` with the
        same seed and settings.
        """
        given = {"candidates": candidates, "truncation": truncation, "law": law}
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if sampler is not None and settings:
            raise UserError(f"{' and '.join(settings)} would be ignored: set it in the sampler, which was given too")
        plan = self.plan(length, chunks)
        writing = Writing(
            sampler=sampler or replace(Resampling(), **settings), num=n, chunks=plan.chunks, look_ahead=look_ahead,
            max_context=self.max_context, max_tokens=plan.max_tokens, is_shortened=plan.is_shortened,
        )  # fmt: skip
        return self.write(prefix, self.space_of(plan.length), stream(seed), writing, progress=progress)

    def plan(self, length: int | None, chunks: int | None = None) -> TextPlan:
        """Return how a text is written: in one go, or in the chunks that the energy was trained on.

        For an energy of chunks ``length`` is that of the text, unless ``chunks`` is given: it is then that of a chunk.
        """
        if self.text_length is None or self.space is None or chunks is not None:
            return TextPlan(length, chunks=1 if chunks is None else chunks)
        most = self.text_length if length is None else length
        if most < 1:
            raise UserError(f"length is {most}: set it to 1 or more")
        return TextPlan(None, chunks=-(-most // self.space.length), max_tokens=most, is_shortened=True)

    def write(
        self,
        prefix: str,
        space: SequenceSpace,
        rng: Rng,
        writing: Writing,
        *,
        progress: Progress = SILENT,
        on_chunk: OnChunk | None = None,
    ) -> Texts:
        """Texts by any sampler, chunk by chunk if asked; ``on_chunk`` is called with the words of each chunk."""
        steps = self.generation(prefix, space, rng, writing)
        if writing.chunks == 1:
            return drive(steps, progress)
        with progress.track("writing", writing.num * writing.chunks, "chunks") as advance:

            def on_event(event: Event) -> None:
                if isinstance(event, Added):
                    advance(1)
                    if on_chunk is not None:
                        on_chunk(prefix, event.text, event.words)

            return drive(steps, progress, on_event)

    def generation(
        self, prefix: str, space: SequenceSpace, rng: Rng, writing: Writing, context: Sequence[int] | None = None
    ) -> Generation:
        """Write the same texts in steps, which somebody else drives; ``context`` are the prefix's tokens, if known."""
        tokenizer = self._tokenizer_for("writing")
        if not isinstance(prefix, str):
            raise UserError(f"the prefix is a {type(prefix).__name__}: give one text per call")
        tokens = tokenizer.encode(prefix) if context is None else context
        target = Target(self.residual, Sequences.from_lists([tokens]), space)
        found = yield from generate(target, tokenizer, prefix, rng, writing)
        notes = (*found.notes, *self.unlike_training(len(tokens), space, writing))
        return replace(found, notes=notes, has_log_prob=has_log_prob(self.base))

    def next(
        self,
        prefix: str,
        *,
        written: str = "",
        top_k: int = 5,
        completions: int | None = 128,
        length: int | None = None,
        seed: int = 0,
        progress: Progress = SILENT,
    ) -> NextTable:
        """Return what follows a prefix and the ``written`` start of a continuation, under base and residual model."""
        tokenizer = self._tokenizer_for("asking what comes next")
        context, head = tokenizer.encode(prefix), list[int]()
        if written:
            joined = join(tokenizer, prefix, [written])
            context, head = joined.context, joined.texts[0].tokens
        target = Target(self.residual, Sequences.from_lists([context]), self.space_of(length))
        found = next_token(target, head, Rng(seed), top_k=top_k, completions=completions, progress=progress)
        return NextTable(prefix + written, found, tokenizer)

    def _tokenizer_for(self, purpose: str) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"this residual model has no tokenizer: pass one to ResidualModel before {purpose}")
        return self.tokenizer

    def unlike_training(self, before: int, space: SequenceSpace, writing: Writing) -> list[str]:
        """Report where the energy reads what it was not trained on; ``before`` is the length of the prefix."""
        notes = []
        if self.space is not None and space.length != self.space.length:
            notes.append(
                f"the energy was trained on continuations of {self.space.length} tokens, not of {space.length}"
            )
        # chunks keep to max_context
        if self.max_context is not None and writing.chunks == 1 and before > self.max_context:
            notes.append(
                f"the energy was trained with {self.max_context} tokens before the continuation, not with {before}"
            )
        return notes

    def space_of(self, length: int | None) -> SequenceSpace:
        """Continuations of ``length`` tokens, or as the energy was trained on."""
        if self.space is None and length is None:
            raise UserError("nothing says how long a continuation is: give a length")
        if self.space is not None:
            return self.space if length is None else replace(self.space, length=length)
        assert length is not None
        return SequenceSpace(vocab_size=self.base.vocab_size, length=length, eos=self.base.eos)

    def save_pretrained(self, folder: str | Path, *, facts: dict[str, Any] | None = None) -> None:
        """Write base, energy, tokenizer and a model card into one folder, whole or not at all.

        ``facts`` are what is known of the pair (how it was trained and measured); they are kept, and shown by the card.
        """
        tokenizer = self._tokenizer_for("saving it")
        if not isinstance(self.energy, Persistent):
            raise UserError(f"the energy {type(self.energy).__name__} has no save_pretrained: give it one, then save")
        with atomic_write(overwritable_folder(folder, RECORD)) as aside:
            save_lm(self.base, aside)
            self.energy.save_pretrained(aside / "energy")
            tokenizer.save(aside / "tokenizer")
            record = {
                "kind": "joint",
                "tokenizer": tokenizer.fingerprint,
                "facts": facts or {},
                "space": None if self.space is None else asdict(self.space),
                "room": self.max_context,
                "text_length": self.text_length,
            }
            write_json(aside / RECORD, record)
            write_text(aside / "README.md", model_card(self.residual, facts or {}))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "ResidualModel":
        """Load what ``save_pretrained`` has written."""
        folder = Path(folder)
        if not (folder / RECORD).is_file():
            raise UserError(f"there is no residual model in {folder}: give a folder that save_pretrained has made")
        tokenizer = Tokenizer.from_pretrained(folder / "tokenizer")
        record = read_json(folder / RECORD)
        if tokenizer.fingerprint != record.get("tokenizer"):
            raise UserError(f"the tokenizer in {folder} is not the one of the residual model: save it again")
        base = load_lm(folder, tokenizer)
        energy = load_energy(folder / "energy", base=base, tokenizer=tokenizer)
        space = None if record.get("space") is None else SequenceSpace(**record["space"])
        lengths = {"max_context": record.get("room"), "text_length": record.get("text_length")}
        return cls(base, energy, tokenizer, space=space, **lengths)
