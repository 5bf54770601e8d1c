import pytest
from hypothesis import given
from hypothesis import strategies as st

from freenergy.corpus import CorpusSettings
from freenergy.corpus.documents import END, lines, pieces, split_documents


def in_blocks(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


def documents(text, size, **settings):
    found = []
    for piece in pieces(split_documents(in_blocks(text, size), CorpusSettings(source="x", **settings))):
        if piece.is_first:
            found.append("")
        found[-1] += piece.text
    return found


text = st.text(alphabet="ab =\n", max_size=60)
size = st.integers(1, 70)


@given(text, size)
def test_lines_are_the_lines(text, size):
    assert [line for line, _ in lines(in_blocks(text, size))] == text.splitlines(keepends=True)


@given(text, size)
def test_document_a_line(text, size):
    assert documents(text, size, documents="line") == [line for line in text.split("\n") if line.strip()]


@given(text, size)
def test_document_a_paragraph(text, size):
    expected, current = [], []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            current.append(line)
        elif current:
            expected.append("\n".join(current))
            current = []
    assert documents(text, size, documents="paragraph") == expected


@given(text, size)
def test_document_from_each_start(text, size):
    found = documents(text, size, document_start="^=")
    assert "".join(found).replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")
    for document in found[1:]:
        assert document.startswith("=")
        assert "\n=" not in document


@given(st.lists(text, max_size=5), st.integers(1, 7), st.integers(4, 30))
def test_pieces_join_to_the_text_however_it_arrives(texts, block, piece_size):
    def fragments(block):
        for text in texts:
            yield from in_blocks(text, block)
            yield END

    found = list(pieces(fragments(block), piece_size))
    assert found == list(pieces(fragments(100), piece_size))
    assert all(len(piece.text) <= piece_size for piece in found)
    joined, kept = "", iter(text for text in texts if text.strip())
    for piece in found:
        joined = piece.text if piece.is_first else joined + piece.text
        if piece.is_last:
            # only blank pieces at the beginning of a document may be missing
            whole = next(kept)
            assert whole.endswith(joined)
            assert not whole.removesuffix(joined).strip()
    assert next(kept, None) is None


@pytest.mark.parametrize(
    ("text", "first"), [("aaaa bb\ncc dd", "aaaa bb"), ("aaaaaa bb;\ncc", "aaaaaa"), ("a" * 13, "a" * 10)]
)
def test_a_long_document_is_cut_before_space_after_a_word(text, first):
    assert next(pieces(iter([text, END]), 10)).text == first


def test_blank_documents_are_left_out():
    assert list(pieces(iter([" \n", END, "", END, "x", END]))) == [("x", True, True)]
