"""A rule-based generator: newswire sentences from a small grammar, and no probability of any of them.

    python examples/rules.py            answers every JSON line {"prefix": …, "seed": …} with a line {"text": …}

It is the black box of the recipe ``black-box-rules`` (docs/black-box.md). Any program that speaks these lines will do.
"""

import json
import random
import sys

WORDS = {
    "NOUN": "company market stock bank price government plan unit share offer rate sale profit issue year "
        "board deal quarter bill loss report price dollar program index group official investor fund",
    "NOUNS": "shares investors analysts sales bonds stocks officials companies prices traders earnings banks",
    "ADJ": "new big federal corporate foreign recent major financial net japanese strong third common public",
    "VERB": "said sold bought expects reported offered cut raised owns makes had agreed",
    "VERB0": "sell buy report offer cut raise make take help consider",
    "DONE": "sold named priced offered made closed traded expected approved",
    "WEEKDAY": "monday tuesday wednesday thursday friday",
}  # fmt: skip
RULES = {
    "S": ["NP VP", "NP VP", "NP said NP VP", "PP NP VP", "NP VP and NP VP", "ASIDE said NAME", "NP AS VP"],
    "NP": ["the NOUN", "the ADJ NOUN", "a ADJ NOUN", "NAME", "COMPANY", "the NOUN of NP", "ADJ NOUNS", "it",
        "they"],
    "VP": ["VERB NP", "VERB NP PP", "will VERB0 NP", "was DONE PP", "rose MONEY", "fell MONEY",
        "has n't DONE NP", "is expected to VERB0 NP", "VERB that NP VP"],
    "PP": ["in NP", "for NP", "on WEEKDAY", "at MONEY", "in the YEAR", "with NP", "from MONEY to MONEY"],
    "AS": ["based in CITY", "a ADJ NOUN", "which VP"],
    "ASIDE": ["NP VP", "we VERB0 NP", "there 's a ADJ NOUN"],
    "NAME": ["mr. <unk>", "<unk> <unk>", "mr. bush", "ms. <unk>", "mr. smith"],
    "COMPANY": ["<unk> corp.", "<unk> inc.", "general motors", "ibm", "ford", "<unk> & co.", "<unk> industries"],
    "CITY": ["new york", "<unk>", "chicago", "london", "tokyo", "washington"],
    "MONEY": ["$ N million", "N %", "$ N a share", "N cents", "$ N billion", "N points"],
    "YEAR": ["third quarter", "year", "past N years", "nine months", "1980s"],
} | {name: words.split() for name, words in WORDS.items()}  # fmt: skip
MAX_DEPTH = 6  # below that the shortest rules are taken


def written(symbol: str, rng: random.Random, depth: int = 0) -> str:
    """Rewrite a symbol by its rules; what is not a symbol is a word."""
    if symbol not in RULES:
        return symbol
    rules = RULES[symbol] if depth < MAX_DEPTH else sorted(RULES[symbol], key=len)[:2]
    return " ".join(written(part, rng, depth + 1) for part in rng.choice(rules).split())


def sentence(prefix: str, seed: int) -> str:
    """One sentence; the same seed gives the same one. It does not read the prefix."""
    return written("S", random.Random(seed))


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"text": sentence(asked["prefix"], asked["seed"])}), flush=True)
