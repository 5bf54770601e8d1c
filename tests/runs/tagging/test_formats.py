"""Labelled text in three formats: read, written back, refused where it is wrong."""

import gzip
import json

import pytest

from freenergy import UserError
from freenergy.tagging.formats import UPOS, XPOS, Columns, read_sentences, to_lines, write_sentences
from freenergy.tagging.sentences import Sentence, TagSet

TABLE = "-DOCSTART- -X- O\n\nThe DT B-NP\nsea NN I-NP\n\t\nis VBZ B-VP\n"
UD = """# sent_id = 1
1-2\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tdo\tdo\tAUX\tVB\t_\t2\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t0\troot\t_\t_
2.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t_\t_

"""


def test_tables_are_read_and_get_a_column(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TABLE)
    first, second = read_sentences(path, columns=Columns(columns=(1,)))
    assert (first.words, first.tags, first.columns) == (("The", "sea"), ("B-NP", "I-NP"), (("DT",), ("NN",)))
    assert second.words == ("is",)
    assert to_lines(first, ["O", "O"], "conll") == ["The DT B-NP O", "sea NN I-NP O"]
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(TABLE.encode()))
    assert read_sentences(packed, columns=Columns(columns=(1,))) == [first, second]
    write_sentences(tmp_path / "b.txt.gz", [first], [["X", "Y"]])
    (again,) = read_sentences(tmp_path / "b.txt.gz")
    assert again.tags == ("X", "Y")


def test_universal_dependencies_keep_ranges_comments_and_empty_nodes(tmp_path):
    path = tmp_path / "a.conllu"
    path.write_text(UD)
    (one,) = read_sentences(path)
    assert (one.words, one.tags) == (("do", "n't"), ("AUX", "PART"))
    assert read_sentences(path, columns=Columns(tag=XPOS))[0].tags == ("VB", "RB")
    write_sentences(tmp_path / "b.conllu", [one], [one.tags])
    assert (tmp_path / "b.conllu").read_text() == UD
    assert "\tX\t" in "\n".join(to_lines(one, ["X", "Y"], "conllu", UPOS))


def test_json_lines_keep_other_keys_and_say_what_is_unknown(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"words": ["a", "b", "c"], "tags": ["N", None, ["N", "V"]], "id": 7}) + "\n")
    (one,) = read_sentences(path)
    assert one.tags == ("N", "_", "N|V")
    assert json.loads(to_lines(one, ["N", "V", "V"], "jsonl")[0]) == {
        "words": ["a", "b", "c"],
        "tags": ["N", "V", "V"],
        "id": 7,
    }
    tags = TagSet.of([one], partial=True)
    assert tags.names == ("N", "V")
    assert [tags.allowed(tag, partial=True).tolist() for tag in one.tags] == [[True, False], [True, True], [True, True]]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "The B\nsea\n", "no column for a tag"),
        ("a.conllu", "1\tdo\n", "CoNLL-U has 10"),
        ("a.jsonl", '{"words": ["a"], "tags": ["N", "V"]}', "give one for each word"),
        ("a.jsonl", '{"words": []}', "has no words"),
        ("a.jsonl", '{"tags": []}', '"words"'),
        ("a.txt", "\n\n", "no sentences"),
    ],
)
def test_wrong_files_are_refused(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        read_sentences(tmp_path / name)


def test_a_label_not_in_the_tag_set_is_refused():
    with pytest.raises(UserError, match="not in the tag set"):
        TagSet(("A", "B")).number("C")
    with pytest.raises(UserError, match="no words"):
        Sentence(())
