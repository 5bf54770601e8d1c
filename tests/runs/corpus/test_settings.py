import pytest

from freenergy.core.errors import UserError
from freenergy.corpus import BytePairTokenizer, CorpusSettings, PretrainedTokenizer, WordTokenizer


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, "corpus.source"),
        ({"train": "a"}, "validation"),
        ({"source": "a", "train": "b"}, "corpus.train"),
        ({"source": "a", "prefix": -1}, "prefix is -1"),
        ({"source": "a", "continuation": 0}, "continuation is 0"),
        ({"source": "a", "stride": 0}, "stride is 0"),
        ({"source": "a", "deduplicate": -2}, "deduplicate is -2"),
        ({"source": "a", "validation_share": 1.5}, "validation_share is 1.5"),
        ({"source": "a", "validation_share": 0.0}, "validation_share is 0"),
        ({"source": "a", "validation_share": 0.5, "test_share": 0.5}, "leaves no"),
        ({"source": "a", "document_start": "("}, "not a regular expression"),
        ({"source": "a", "document_start": "^=", "documents": "line"}, "leave one of them out"),
        ({"source": "a", "text_column": ""}, "text_column"),
    ],
)
def test_bad_settings_are_one_sentence(settings, names):
    with pytest.raises(UserError, match=names) as caught:
        CorpusSettings(**settings)
    assert "\n" not in str(caught.value)


def test_bad_tokenizer_settings():
    with pytest.raises(UserError, match="257"):
        BytePairTokenizer(vocab_size=256)
    with pytest.raises(UserError, match="sample_megabytes"):
        BytePairTokenizer(sample_megabytes=0)
    with pytest.raises(UserError, match="at least 3"):
        WordTokenizer(vocab_size=2)
    with pytest.raises(UserError, match="path is empty"):
        PretrainedTokenizer(path="")


def test_stride_and_ngram_follow_the_window():
    settings = CorpusSettings(source="a", prefix=4, continuation=8)
    assert (settings.step, settings.ngram) == (8, 12)
    assert CorpusSettings(source="a", stride=3).step == 3
    assert CorpusSettings(source="a").ngram == 24
    assert CorpusSettings(source="a", deduplicate=0).ngram == 0
