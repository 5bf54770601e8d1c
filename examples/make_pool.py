"""A pool of texts that people wrote: sentences of Wikipedia, spelled as the Penn Treebank spells newswire.

    python examples/make_pool.py pool.jsonl            one line {"text": …} per sentence, in random order

It is the black box of the recipe ``black-box-pool`` (docs/black-box.md): nothing can be asked of it but its texts.
"""

import json
import random
import re
import sys
from pathlib import Path

from freenergy import fetch

SHORTEST, LONGEST = 6, 40  # words


def sentences(text: str) -> list[str]:
    """The sentences of articles, lower-case, without punctuation, numbers as N."""
    found = []
    for line in text.splitlines():
        if not line.strip() or line.startswith(" ="):  # a heading
            continue
        for part in re.split(r" [.?!] ", f"{line} "):
            words = re.sub(r" @(.)@ ", r"\1", part).lower()
            words = re.sub(r"\d[\d.,:]*", "N", words)
            words = re.sub(r" [^\w$%&<'-]+(?= )", " ", f" {words} ").split()
            if SHORTEST <= len(words) <= LONGEST:
                found.append(" ".join(words))
    return found


if __name__ == "__main__":
    source = fetch("wikitext-2") / "train.txt"
    pool = sentences(source.read_text(encoding="utf-8"))
    random.Random(0).shuffle(pool)
    lines = [json.dumps({"text": text}) for text in pool[:20_000]]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines):,} sentences are in {sys.argv[1]}")
