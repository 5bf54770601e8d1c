"""A tiny world of tagged sentences: names are spans, and what a word is shows in its neighbours."""

from freenergy import Rng

NAMES = {"PER": ["Ada Lovelace", "Alan Turing", "Noam", "Grace Hopper"], "LOC": ["Paris", "New York", "Rome"]}
VERBS = ["visits", "leaves", "sees", "likes"]


def sentences(count, seed):
    rng = Rng(seed)

    def pick(items):
        return items[int(rng.integer() % len(items))]

    found = []
    for _ in range(count):
        rows = []
        for kind, follow in (("PER", pick(VERBS)), ("LOC", ".")):
            words = pick(NAMES[kind]).split()
            rows += [(word, "NNP", f"{'B' if i == 0 else 'I'}-{kind}") for i, word in enumerate(words)]
            rows.append((follow, "VBZ" if kind == "PER" else ".", "O"))
        found.append(rows)
    return found


def write(path, rows):
    path.write_text("\n\n".join("\n".join(" ".join(row) for row in sentence) for sentence in rows) + "\n")


SMALL = {
    "kind": "neural", "words": 8, "character_width": 8, "buckets": 100, "columns": 4, "hidden": 8, "labels": 6,
    "beam": 3, "dropout": 0.1, "word_dropout": 0.02,
    "optimisation": {"steps": 30, "batch_size": 16, "warmup": 2, "validate_every": 10, "learning_rate": 0.05},
}  # fmt: skip
