"""What the workers of these tests do, and how they are driven: a module that other processes can import."""

import os
import signal
from functools import partial
from pathlib import Path

import numpy as np

from freenergy import Rng, SequenceSpace, TabularLM, UserError
from freenergy.core.files import file_hash
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.noise.from_lm import FromLM
from freenergy.noise.store import Identity, NegativeShards

V, P, L, K = 5, 4, 3, 6
SPACE = SequenceSpace(vocab_size=V, length=L, eos=0)


def square(x):
    return x * x


def process(x):
    return os.getpid()


def refuse_three(x):
    if x == 3:
        raise UserError("three is refused: give another number")
    return x


def die_at_first(folder, x):
    """Leave a file a try; the first try of 3 kills its worker."""
    tries = len(list(Path(folder).glob(f"{x}-*")))
    Path(folder, f"{x}-{tries}").write_text("")
    if x == 3 and tries == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def die_always(x):
    if x == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def shards(folder, rng):
    """A small store of negatives, 8 shards."""
    stream = np.arange(400) * 7 % V
    places = places_of(np.arange(40) * 9, L)
    identity = Identity(
        lm="m", tokenizer="t", corpus="c", split="train", seed=1, per_prefix=K, sources="base", space=SPACE
    )
    source = FromLM(TabularLM.random(Rng(2), vocab_size=V, order=2), SPACE)
    return NegativeShards(folder, Rng(3).permutation(40), Windows(stream, places, P, L), source, identity, rng, shard=5)


def draw(folder, k):
    shards(folder, Rng(1)).make(k)


def draw_by_worker(folder, k):
    """The mutant: randomness of whoever draws."""
    shards(folder, Rng(os.getpid())).make(k)


def drawn(engine, do, folder):
    """Hashes of the eight shards that an engine makes."""
    list(engine.map_unordered(partial(do, folder), range(8)))
    return {path.name: file_hash(path) for path in folder.glob("*.parquet")}


def taking(numbers, taken):
    """Numbers that tell when they are taken."""
    for number in numbers:
        taken.append(number)
        yield number


def asked_to_stop(engine, done):
    """This process gets SIGTERM at the first result."""
    for item, _ in engine.map_unordered(square, range(100)):
        done.append(item)
        signal.raise_signal(signal.SIGTERM)
