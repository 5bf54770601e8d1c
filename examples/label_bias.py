"""Label bias: what a model that is normalised word by word cannot learn, and one that is normalised over all can.

    local     p(y | x) = Π_t p(y_t | y_{t−1}, x_t)                      each step sums to one (MEMM, RNN-T)
    global    p(y | x) = exp(Σ_t s(y_{t−1}, y_t, x_t)) / Z(x)           all of them together sum to one (CRF)

Three cases, all exact:

1. The monograph's three sentences, "Tom likes tea", "John likes tea", "Alice like tea". A bigram model cannot tell
   "Alice likes tea" from "Tom like tea"; a log-linear model with the same bigrams as features prefers the first.
2. A fork: r·i·b is tagged 1·2·5 and r·o·b is tagged 3·4·5, and only these pairs of tags follow each other. After the
   first tag a local model has no choice left, so it must give all of its probability to whatever it has begun, however
   wrong the second letter is. The rarer word is always tagged like the commoner one. A global model is right.
3. Streaming: in a local model the first tag does not depend on later letters. In a global one it does.
"""

import argparse
import json
import sys
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import Tensor

from freenergy.structured import Allowed, LinearChain

NAMES, VERBS = ("Tom", "John", "Alice"), ("likes", "like")
TRAIN = (("Tom", "likes"), ("John", "likes"), ("Alice", "like"))
ALICE_LIKES, TOM_LIKE = ("Alice", "likes"), ("Tom", "like")

WORDS = ("rib", "rob")
TAGGINGS = {"rib": (0, 1, 4), "rob": (2, 3, 4)}  # tags 1 … 5, counted from 0
K = 5
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def bigram_log_probs(eps: float) -> dict[tuple[str, str], float]:
    """Log-probabilities of the two test sentences under a bigram model with eps for unseen pairs."""
    seen = {pair: TRAIN.count(pair) / sum(name == pair[0] for name, _ in TRAIN) for pair in TRAIN}
    first = torch.tensor(1 / 3, dtype=torch.float64).log().item()
    step = torch.tensor(eps, dtype=torch.float64).log().item()
    return {pair: first + (step if pair not in seen else 0.0) for pair in (ALICE_LIKES, TOM_LIKE)}


def features() -> tuple[list[tuple[str, str]], Tensor]:
    """The six strings, and f_1 … f_9 of each."""
    strings = list(product(NAMES, VERBS))
    rows = []
    for name, verb in strings:
        own = [name == each for each in NAMES] + [(name, verb) == pair for pair in TRAIN]
        rows.append([*own, verb == "likes", verb == "like", True])
    return strings, torch.tensor(rows, dtype=torch.float64)


def global_log_probs(steps: int, rate: float = 1.0) -> list[tuple[float, float]]:
    """Gradient ascent of the likelihood from 0: after each step, the log-probabilities of the two test sentences.

    The optimum is at infinity (f_4, f_5, f_6 separate the training sentences), so the numbers fall for ever; their
    order and their distance settle.
    """
    strings, f = features()
    wanted = torch.stack([f[strings.index(pair)] for pair in TRAIN]).mean(0)
    a, b = strings.index(ALICE_LIKES), strings.index(TOM_LIKE)
    weights, path = torch.zeros(f.shape[1], dtype=torch.float64), []
    for _ in range(steps):
        log_p = (f @ weights).log_softmax(0)
        path.append((log_p[a].item(), log_p[b].item()))
        weights = weights + rate * (wanted - log_p.exp() @ f)
    return path


def allowed() -> Allowed:
    """The pairs of tags that the two words have."""
    pairs, start = torch.zeros(K, K, dtype=torch.bool), torch.zeros(K, dtype=torch.bool)
    for tags in TAGGINGS.values():
        start[tags[0]] = True
        for before, after in pairwise(tags):
            pairs[before, after] = True
    return Allowed(pairs=pairs, start=start)


def emissions(table: Tensor) -> Tensor:
    """Weights of letter and tag for both words [2, 3, K]."""
    letters = sorted({letter for word in WORDS for letter in word})
    return table[torch.tensor([[letters.index(letter) for letter in word] for word in WORDS])]


def local_chain(table: Tensor, transitions: Tensor) -> LinearChain:
    """The MEMM: each step is normalised over the tags that may follow."""
    e, rule = emissions(table), allowed()
    forbidden = torch.finfo(e.dtype).min
    first = torch.where(rule.start, e[:, 0], forbidden).log_softmax(1)
    has_next = rule.pairs.any(1)[None, None, :, None]
    score = torch.where(rule.pairs | ~has_next, e[:, 1:, None, :] + transitions, forbidden).log_softmax(3)
    steps = torch.where(rule.pairs, score, 0.0)
    begin = torch.cat([torch.where(rule.start, first, 0.0).unsqueeze(1), torch.zeros_like(e[:, 1:])], 1)
    return LinearChain(begin, steps, allowed=rule)


def global_chain(table: Tensor, transitions: Tensor) -> LinearChain:
    """The CRF with the same weights."""
    return LinearChain(emissions(table), transitions, allowed=allowed())


def fitted(make: object, share: float, steps: int, l2: float = 1e-3) -> LinearChain:
    """Maximum likelihood with a small penalty, by L-BFGS; ``share`` of the training words are rib."""
    letters = len({letter for word in WORDS for letter in word})
    weights = [torch.zeros(letters, K, dtype=torch.float64), torch.zeros(K, K, dtype=torch.float64)]
    for each in weights:
        each.requires_grad_()
    y = torch.tensor([TAGGINGS[word] for word in WORDS])
    counts = torch.tensor([share, 1 - share], dtype=torch.float64)
    optimiser = torch.optim.LBFGS(weights, max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = -(counts * make(*weights).log_prob(y)).sum() + l2 / 2 * sum(each.square().sum() for each in weights)
        value.backward()
        return value

    optimiser.step(loss)
    return make(*(each.detach() for each in weights))


def fork(share: float, steps: int) -> dict[str, object]:
    """How the rarer word is tagged, and whether the first tag has seen the second letter."""
    y = torch.tensor([TAGGINGS[word] for word in WORDS])
    found: dict[str, object] = {"share": share}
    for name, make in (("local", local_chain), ("global", global_chain)):
        chain = fitted(make, share, steps)
        found[name] = {
            "right": chain.log_prob(y).exp()[1].item(),
            "is_right": chain.argmax().labels[1].equal(y[1]),
            "first_tag": chain.marginals()[:, 0, 0].tolist(),  # p(y_1 = 1 | rib), p(y_1 = 1 | rob)
        }
    return found


def run(*, quick: bool) -> dict[str, object]:
    """All three cases."""
    path = global_log_probs(2_000 if quick else 20_000)
    near = min(range(len(path)), key=lambda i: abs(path[i][0] + 7.06))
    sentences = {
        "local": {str(eps): bigram_log_probs(eps) for eps in (1e-1, 1e-3, 1e-6)},
        "path": [path[i] for i in sorted({int(1.1**n) for n in range(200) if 1.1**n < len(path)} | {0})],
        "near": path[near],
        "gap": path[-1][0] - path[-1][1],
    }
    sentences["local"] = {eps: list(each.values()) for eps, each in sentences["local"].items()}
    return {"sentences": sentences, "fork": [fork(share, 100) for share in SHARES]}


def table(result: dict) -> str:
    own = result["sentences"]
    lines = ["1. log P of    Alice likes tea   Tom like tea"]
    lines += [f"   bigrams, eps = {eps:<6} {a:10.2f} {b:12.2f}" for eps, (a, b) in own["local"].items()]
    a, b = own["near"]
    lines.append(f"   log-linear on its way {a:8.2f} {b:12.2f}     (the monograph prints −7.06 and −7.79)")
    lines += [f"   in the end they differ by {own['gap']:.3f} nats", ""]
    lines += ["2. p(right tags of rob)          3. p(first tag is that of rib, given rib; given rob)"]
    lines += ["   share of rib   local  global     local            global"]
    for row in result["fork"]:
        a, b = row["local"], row["global"]
        lines.append(
            f"   {row['share']:12.0%}  {a['right']:6.3f}  {b['right']:6.3f}     {a['first_tag'][0]:.3f}  "
            f"{a['first_tag'][1]:.3f}     {b['first_tag'][0]:.3f}  {b['first_tag'][1]:.3f}"
        )
    return "\n".join(lines)


def plot(result: dict, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    walk = result["sentences"]["path"]
    left.plot([a for a, _ in walk], [b for _, b in walk], color="#0072B2", label="log-linear, as it is trained")
    ends = [min(min(pair) for pair in walk), max(max(pair) for pair in walk)]
    left.plot(ends, ends, ":", color="black", label="bigrams: the same for both")
    left.plot(*result["sentences"]["near"], "D", color="#0072B2", label="where the monograph stops")
    left.set(xlabel="log P(Alice likes tea)", ylabel="log P(Tom like tea)", title="Three sentences")
    left.legend(frameon=False, fontsize=8)
    shares = [row["share"] for row in result["fork"]]
    right.plot(shares, [row["global"]["right"] for row in result["fork"]], "D--", color="#0072B2", label="global (CRF)")
    right.plot(shares, [row["local"]["right"] for row in result["fork"]], "s-.", color="#D55E00", label="local (MEMM)")
    right.set(
        xlabel="share of rib among the training words", ylabel="p(right tags of rob)", ylim=(0, 1.05), title="A fork"
    )
    right.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps of the log-linear model")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", type=Path, help="write a picture (needs matplotlib)")
    arguments = parser.parse_args()
    result = run(quick=arguments.quick)
    print(json.dumps(result) if arguments.json else table(result))
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
