"""A record that is nested too deep is one reject, and not the end of a build."""

import json

import penstock
from penstock.chat.chat import Chat
from penstock.sources.settings import Texts

GOOD = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def nested(depth):
    value = "x"
    for _ in range(depth):
        value = [value]
    return value


def test_deep_records_are_rejects(tmp_path):
    records = [{"messages": GOOD}, {"messages": GOOD, "tools": nested(700)}]
    records += [{"messages": GOOD, "tools": json.dumps(nested(700))}]
    records += [{"messages": [{**GOOD[0], "x": nested(700)}, GOOD[1]]}, {"messages": GOOD}]
    records += [{"messages": GOOD, "tools": [{"name": "f", "parameters": nested(30)}]}]

    store = penstock.build(
        Texts(list(map(json.dumps, records))),
        tmp_path / "store",
        chat=Chat("chatml", "gpt2", add_tokens="auto"),
        max_bad=10,
    )

    assert len(store) == 3
    (done,) = store.manifest.builds
    assert done["rejects"]["reasons"] == {"nested_too_deep": 3}
