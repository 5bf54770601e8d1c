"""A table of logits that learns, as a language model."""

import torch
from torch import nn

from freenergy import TabularLM
from freenergy.core.truncation import ANCESTRAL


class NgramLogits(nn.Module):
    """Logits over the last ``order`` tokens; it starts uniform."""

    draws_here = True

    def __init__(self, *, vocab_size, order, eos=0):
        super().__init__()
        self.vocab_size, self.eos, self.max_length = vocab_size, eos, None
        self.logits = nn.Parameter(torch.zeros(vocab_size**order, vocab_size, dtype=torch.float64))

    def log_prob(self, x):
        return TabularLM(self.logits, eos=self.eos).log_prob(x)

    def next_log_probs(self, contexts):
        return TabularLM(self.logits, eos=self.eos).next_log_probs(contexts)

    def sample(self, contexts, num, space, rng, truncation=ANCESTRAL):
        return TabularLM(self.logits, eos=self.eos).sample(contexts, num, space, rng, truncation)
