"""Settings that cannot be meant are refused before anything is read."""

import pytest

from penstock.errors import SourceError
from penstock.sources.settings import ReadSettings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "csv"}, r'format=.csv. is not known. Choose one of "auto", "text"'),
        ({"errors": "ignore"}, r"errors=.ignore. is not"),
        ({"documents": ""}, r"separates nothing"),
        ({"field": ""}, r"contains an empty name"),
        ({"field": "a..b"}, r"field=.a\.\.b. contains an empty name"),
        ({"max_document_bytes": 0}, r"must be at least 1"),
        ({"max_expansion": 0}, r"must be at least 1"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(SourceError, match=message):
        ReadSettings(**settings)
